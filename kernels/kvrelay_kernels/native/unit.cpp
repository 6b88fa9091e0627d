// The C functions of the library. Compiled once per instruction set into a library of its own: what the compiler
// emits for one set (inlined standard library included) can never be run by the choice of another.
#include "../decoder/step.h"
#include "../sample/greedy.h"
#include "abi.h"

#define KVR_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvrelay {
namespace {

StepBuffers& buffers() {
  thread_local StepBuffers kept;
  return kept;
}

/// f(i) for every i in [0, count), shared out evenly.
template <class F>
void for_each(int64_t count, int threads, F f) {
  if (threads == 1 || count == 1) {
    for (int64_t i = 0; i < count; i++) f(i);
    return;
  }
  Team& team = Team::of(threads);
  team.run([&](int index) {
    const Share share(count, index, team.size());
    for (int64_t i = share.begin; i < share.end; i++) f(i);
  });
}

}  // namespace

KVR_EXPORT void kvr_pack(const void* weight, int64_t n, int64_t k, int32_t type, void* packed) {
  if (type == kBfloat16) pack_panels((const bf16*)weight, n, k, (bf16*)packed);
  else pack_panels((const float*)weight, n, k, (float*)packed);
}

/// `format` without data. codes, scales, offsets: see pack_codes.
KVR_EXPORT void kvr_pack_codes(
    const Matrix* format, const int8_t* codes, const char* scales, const char* offsets, char* packed) {
  pack_codes(*format, codes, scales, offsets, packed);
}

KVR_EXPORT void kvr_linear(const Matrix* m, Rows x, int64_t rows, Rows y, int threads) {
  StepBuffers& kept = buffers();
  kept.inputs.reserve(rows, m->k);
  if ((int64_t)kept.wide.size() < rows * m->n) kept.wide.resize((size_t)(rows * m->n));
  const Inputs inputs = kept.inputs.of(*m);
  for_each(rows, threads, [&](int64_t row) {
    each(m->k, [&](int64_t i, int lanes) KVR_HOT { inputs.put(row, i, load_at(x.data, x.type, row * x.row_stride + i, lanes), lanes); });
    inputs.pad(row);
  });
  float* sums = kept.wide.data();
  Team::of(threads).run([&](int index) { multiply(*m, inputs, rows, sums, m->n, false, index, threads); });
  for_each(rows, threads, [&](int64_t row) {
    each(m->n, [&](int64_t i, int lanes) KVR_HOT {
      store_at(y.data, y.type, row * y.row_stride + i, load_n(sums + row * m->n + i, lanes), lanes);
    });
  });
}

KVR_EXPORT void kvr_rms_norm(Rows x, const float* weight, int64_t rows, int64_t size, float eps, Rows y, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    norm_row(
        size, weight, eps, [&](int64_t i, int lanes) KVR_HOT { return load_at(x.data, x.type, row * x.row_stride + i, lanes); },
        [&](int64_t i, V v, int lanes) KVR_HOT { store_at(y.data, y.type, row * y.row_stride + i, v, lanes); });
  });
}

/// The sum replaces `residual`, rounded to its type, and is what is normalised.
KVR_EXPORT void kvr_add_rms_norm(
    Rows x, Rows residual, const float* weight, int64_t rows, int64_t size, float eps, Rows y, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    each(size, [&](int64_t i, int lanes) KVR_HOT {
      const int64_t at = row * residual.row_stride + i;
      const V sum = load_at(residual.data, residual.type, at, lanes) + load_at(x.data, x.type, row * x.row_stride + i, lanes);
      store_at(residual.data, residual.type, at, sum, lanes);
    });
  });
  kvr_rms_norm(residual, weight, rows, size, eps, y, threads);
}

KVR_EXPORT void kvr_silu_and_mul(Rows gate_up, int64_t rows, int64_t ffn, Rows y, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    each(ffn, [&](int64_t i, int lanes) KVR_HOT {
      const int64_t at = row * gate_up.row_stride + i;
      const V gate = load_at(gate_up.data, gate_up.type, at, lanes), up = load_at(gate_up.data, gate_up.type, at + ffn, lanes);
      store_at(y.data, y.type, row * y.row_stride + i, silu_times(gate, up), lanes);
    });
  });
}

KVR_EXPORT void kvr_rotary(
    Rows x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t head_dim, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    for (int64_t head = 0; head < heads; head++)
      rotate_head(x.data, x.type, row * x.row_stride + head * head_dim, head_dim, cos + row * head_dim, sin + row * head_dim);
  });
}

KVR_EXPORT void kvr_write_kv(Rows kv, const int64_t* slots, int64_t rows, const Cache* cache, int threads) {
  for_each(rows, threads, [&](int64_t row) {
    const int64_t block = slots[row] / cache->block_size, slot = slots[row] % cache->block_size;
    write_token(*cache, block, slot, kv.data, kv.type, row * kv.row_stride);
  });
}

KVR_EXPORT void kvr_attention(
    Rows q, const Cache* cache, const Batch* batch, int64_t heads, float scale, int64_t window, Rows out, int threads) {
  StepBuffers& kept = buffers();
  if (kept.attentions.empty()) kept.attentions.resize(1);
  kept.scratch.resize((size_t)threads);
  Attention& work = kept.attentions[0];
  work.plan(*batch, *cache, {heads, window, scale}, threads);
  Team& team = Team::of(threads);
  team.restart();
  const auto put = [&](int64_t row, int64_t at, V v, int lanes) KVR_HOT {
    store_at(out.data, out.type, row * out.row_stride + at, v, lanes);
  };
  team.run([&](int index) {
    AttentionScratch& scratch = kept.scratch[(size_t)index];
    for (int64_t i = team.next(); i < work.num_items(); i = team.next()) work.work(i, *cache, q, scratch, put);
    team.barrier();
    if (work.is_split()) work.finish(index, team.size(), scratch, put);
  });
}

KVR_EXPORT void kvr_greedy(
    const float* logits, int64_t rows, int64_t stride, int64_t n, float* values, int64_t* ids, int threads) {
  for_each(rows, threads, [&](int64_t row) { largest_of_row(logits + row * stride, n, values + row, ids + row); });
}

KVR_EXPORT void kvr_decoder_step(const Decoder* model, const Step* step, int threads) {
  DecoderStep(*model, *step, Team::of(threads), buffers()).run();
}

}  // namespace kvrelay
