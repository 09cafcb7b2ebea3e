// The error word: pinned memory to which a kernel reports bad data, and which the host reads later.
#include "host/error_word.h"

#include <array>
#include <atomic>
#include <mutex>

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/launch.h"
#endif

namespace warpwright {
namespace {

constexpr int kSources = static_cast<int>(ErrorSource::kCount);

// The sentence of an error, by source.
std::string message(ErrorSource source, const ErrorRecord& record) {
  const std::string row = std::to_string(record.row_plus_one - 1);
  const std::string value = std::to_string(record.value);
  switch (source) {
    case ErrorSource::kKvCacheLength:
      return "attention_with_kv_cache: cache_seqlens: " + value +
             " is negative or more than the cache holds. (sequence " + row + ")";
    case ErrorSource::kKvCacheTable:
      return "attention_with_kv_cache: block_table: " + value +
             " is no page of the cache. (entry " + row + ", counted flat)";
    case ErrorSource::kVarlenQueries:
    case ErrorSource::kVarlenKeys: {
      const std::string q_or_k = source == ErrorSource::kVarlenQueries ? "q" : "k";
      return "attention_varlen: cu_seqlens_" + q_or_k + ": " + value +
             " is no end of a sequence: out of order, past the tokens, or more than max_seqlen_" +
             q_or_k + " after the last end. (sequence " + row + ")";
    }
    case ErrorSource::kEmbedding:
      return "embedding: index out of range in self: " + value +
             " is no row of weight. (position " + row + " of indices, counted flat)";
    case ErrorSource::kCrossEntropy:
    default:
      return "cross_entropy: Target " + value + " is out of bounds. (row " + row +
             " of target, counted flat)";
  }
}

std::atomic<bool> strict{false};
// Bit i: device i has the word's address.
std::atomic<uint64_t> devices{0};
std::atomic<ErrorRecord*> word{nullptr};  // kSources records, for the life of the process
std::mutex take_mutex;

}  // namespace

std::optional<std::string> take_error() {
  ErrorRecord* records = word.load();
  if (records == nullptr) return std::nullopt;
  const std::lock_guard<std::mutex> lock(take_mutex);
  for (int source = 0; source < kSources; ++source) {
    // The device writes this memory, which the compiler does not know.
    volatile ErrorRecord* record = records + source;
    const ErrorRecord seen{record->row_plus_one, record->value};
    if (seen.row_plus_one == 0) continue;
    record->row_plus_one = 0;
    return message(static_cast<ErrorSource>(source), seen);
  }
  return std::nullopt;
}

std::vector<int> error_word_devices() {
  std::vector<int> result;
  const uint64_t mask = devices.load();
  for (int device = 0; device < 64; ++device) {
    if (mask >> device & 1) result.push_back(device);
  }
  return result;
}

bool is_strict() { return strict.load(std::memory_order_relaxed); }
void set_strict(bool value) { strict.store(value); }

#ifdef WARPWRIGHT_WITH_CUDA
namespace {

ErrorRecord* allocate_word() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (ErrorRecord* records = word.load()) return records;
  // A stream capture allows an allocation only in this mode. The allocation is not captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cuda_check(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(&memory, kSources * sizeof(ErrorRecord),
                                           cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  cuda_check(status, "error word");
  auto* records = static_cast<ErrorRecord*>(memory);
  for (int source = 0; source < kSources; ++source) records[source] = ErrorRecord{0, 0};
  word.store(records);
  return records;
}

}  // namespace

ErrorRecord* error_record(ErrorSource source) {
  ErrorRecord* records = word.load(std::memory_order_acquire);
  if (records == nullptr) records = allocate_word();
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = uint64_t{1} << device % 64;
  if ((devices.load(std::memory_order_relaxed) & bit) == 0) devices.fetch_or(bit);
  // Under unified addressing the host's pointer is every device's pointer.
  return records + static_cast<int>(source);
}

std::optional<std::string> check_strict(cudaStream_t stream) {
  if (!is_strict()) return std::nullopt;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return std::nullopt;
  cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return take_error();
}
#endif

}  // namespace warpwright
