"""Training on several GPUs or hosts, on top of ``torch.distributed``.

DDP, FSDP2 and tensor parallelism are PyTorch's. This package gives them what they need of our
operators: sharding rules for DTensor (:mod:`.sharding`), batch norm with statistics of all ranks
(:mod:`.sync_batch_norm`), and errors that name the rank that failed (:func:`guard`). The guide is
docs/distributed.md.
"""
