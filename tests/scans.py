"""What the tests of the scans share: shapes, and native's scans in both directions."""

# One element, rows shorter and longer than a vector, whole tiles of every type, and look-backs.
SHAPES = [
    ((), 0),
    ((0,), 0),
    ((3, 0, 4), 1),
    ((3, 0, 4), 2),
    ((1,), 0),
    ((5, 1, 3), 1),
    ((37, 3), 1),
    ((6, 33), -1),
    ((2, 4096), 1),
    ((2, 16385), 1),
    ((40001,), 0),
    ((4, 7, 5), 1),
    ((2, 65, 16), 1),
    ((130, 3, 8), 0),
    ((1030, 24), 0),
    ((5000, 3), 0),
]


def reversed_of(native):
    return lambda x, dim: native(x.flip(dim), dim).flip(dim) if x.dim() else native(x, dim)


def direction(ours, native, reverse):
    """(ours, native) in one direction."""
    theirs = reversed_of(native) if reverse else native
    return (lambda x, dim: ours(x, dim, reverse=reverse)), theirs
