// All layers of one step in one call: tokens in, KV written on the way, logits of the rows that draw out.
//
//   h = embedding[token]                                                          float32, the residual stream
//   per layer:  qkv = W·norm(h) │ turn q and k, write k and v │ attention │ h += W·mixed
//               gate_up = W·norm(h) │ silu(gate)·up │ h += W·gated                 │: all threads wait for each other
//   logits = head·norm(h[last rows])
//
// Bound: one pass over the weights per step while few tokens are computed (bandwidth), 2·weights FLOPs per token later.
// Between linear layers everything is float32; what a linear layer reads is rounded to its format once.
#pragma once

#include "../linear/linear.h"
#include "../paged_attention/attention.h"
#include "../rms_norm/rms_norm.h"
#include "../rotary/rotary.h"
#include "../silu_and_mul/silu_and_mul.h"
#include "table.h"

namespace kvrelay {

/// Buffers of a step, reused by the next one on the same thread. Grow to the largest step seen.
struct StepBuffers {
  Aligned<float> residual, wide;  // [tokens, hidden], [tokens, qkv or gate_up]
  std::vector<int32_t> positions, sequences;
  std::vector<AttentionScratch> scratch;  // per thread
  std::vector<Attention> attentions;      // per window
  std::vector<int64_t> windows;
  InputBuffer inputs;
};

class DecoderStep {
 public:
  DecoderStep(const Decoder& model, const Step& step, Team& team, StepBuffers& buffers)
      : model_(model), step_(step), team_(team), buffers_(buffers) {
    const int64_t tokens = step.num_tokens, qkv = (model.heads + 2 * model.kv_heads) * model.head_dim;
    const int64_t attended = model.heads * model.head_dim, widest = qkv > 2 * model.ffn ? qkv : 2 * model.ffn;
    int64_t deepest = model.hidden > model.ffn ? model.hidden : model.ffn;
    deepest = deepest > attended ? deepest : attended;
    grow(buffers.residual, tokens * model.hidden);
    grow(buffers.wide, tokens * widest);
    buffers.inputs.reserve(tokens, deepest);
    buffers.scratch.resize((size_t)team.size());
    place_tokens();
    plan_attention();
  }

  void run() {
    team_.run([this](int index) {
      embed(index);
      for (int64_t i = 0; i < model_.num_layers; i++) {
        attend(model_.layers[i], index);
        feed_forward(model_.layers[i], index);
      }
      head(index);
    });
  }

 private:
  static void grow(Aligned<float>& numbers, int64_t size) {
    if ((int64_t)numbers.size() < size) numbers.resize((size_t)size);
  }

  void place_tokens() {
    buffers_.positions.clear();
    buffers_.sequences.clear();
    for (int64_t i = 0; i < step_.batch.num_sequences; i++)
      for (int32_t query = 0; query < step_.batch.query_lens[i]; query++) {
        buffers_.positions.push_back(step_.batch.kv_lens[i] - step_.batch.query_lens[i] + query);
        buffers_.sequences.push_back((int32_t)i);
      }
  }

  void plan_attention() {
    buffers_.windows.clear();
    for (int64_t i = 0; i < model_.num_layers; i++) {
      if (attention_index(model_.layers[i].window) >= 0) continue;
      buffers_.windows.push_back(model_.layers[i].window);
      const size_t index = buffers_.windows.size() - 1;
      if (buffers_.attentions.size() <= index) buffers_.attentions.resize(index + 1);
      const AttentionShape shape = {model_.heads, model_.layers[i].window, model_.scale};
      buffers_.attentions[index].plan(step_.batch, cache(model_.layers[i]), shape, team_.size());
    }
  }

  int64_t attention_index(int64_t window) const {
    for (size_t i = 0; i < buffers_.windows.size(); i++)
      if (buffers_.windows[i] == window) return (int64_t)i;
    return -1;
  }

  Cache cache(const Layer& layer) const {
    return {layer.cache, model_.block_stride, model_.kv_heads, model_.block_size, model_.head_dim, model_.kv_type};
  }

  float* residual(int64_t row) const { return buffers_.residual.data() + row * model_.hidden; }
  Share share(int64_t count, int index) const { return Share(count, index, team_.size()); }

  void embed(int index) const {
    const Share rows = share(step_.num_tokens, index);
    for (int64_t row = rows.begin; row < rows.end; row++)
      each(model_.hidden, [&](int64_t i, int lanes) KVR_HOT {
        store_n(residual(row) + i, look_up(model_.embedding, step_.token_ids[row], i, lanes), lanes);
      });
  }

  /// x · Wᵀ for inputs that all threads have finished. Ends with a barrier.
  void linear(const Matrix& m, int64_t rows, float* y, bool add, int index) const {
    multiply(m, buffers_.inputs.of(m), rows, y, m.n, add, index, team_.size());
    team_.barrier();
  }

  /// Every thread's share of inputs to `m`; `put_row(inputs, i)` fills row i. Ends with a barrier.
  template <class F>
  void inputs_for(const Matrix& m, int64_t rows, int index, F put_row) const {
    const Inputs inputs = buffers_.inputs.of(m);
    const Share mine = share(rows, index);
    for (int64_t row = mine.begin; row < mine.end; row++) {
      put_row(inputs, row);
      inputs.pad(row);
    }
    team_.barrier();
  }

  void normalise(const float* weight, const float* x, const Inputs& inputs, int64_t row) const {
    const auto load_x = [&](int64_t i, int lanes) KVR_HOT { return load_n(x + i, lanes); };
    const auto put = [&](int64_t i, V v, int lanes) KVR_HOT { inputs.put(row, i, v, lanes); };
    norm_row(model_.hidden, weight, model_.eps, load_x, put);
  }

  void attend(const Layer& layer, int index) const {
    const int64_t tokens = step_.num_tokens;
    float* qkv = buffers_.wide.data();
    inputs_for(layer.qkv, tokens, index, [&](const Inputs& inputs, int64_t row) {
      normalise(layer.input_norm, residual(row), inputs, row);
    });
    linear(layer.qkv, tokens, qkv, false, index);
    const Share rows = share(tokens, index);
    for (int64_t row = rows.begin; row < rows.end; row++) place(layer, qkv + row * layer.qkv.n, row);
    mix(layer, qkv, index);
    linear(layer.output, tokens, buffers_.residual.data(), true, index);
  }

  /// Norms and turns a token's query and key heads and writes its keys and values.
  void place(const Layer& layer, float* qkv, int64_t row) const {
    const int64_t dim = model_.head_dim, turned = model_.heads + model_.kv_heads, position = buffers_.positions[row];
    for (int64_t head = 0; head < turned; head++) {
      float* x = qkv + head * dim;
      const float* weight = head < model_.heads ? layer.q_norm : layer.k_norm;
      const auto load_x = [&](int64_t i, int lanes) KVR_HOT { return load_n(x + i, lanes); };
      const auto put = [&](int64_t i, V v, int lanes) KVR_HOT { store_n(x + i, v, lanes); };
      if (weight) norm_row(dim, weight, model_.eps, load_x, put);
      rotate_head(x, kFloat32, 0, dim, model_.cos + position * dim, model_.sin + position * dim);
    }
    const int32_t* table = step_.batch.tables + buffers_.sequences[row] * step_.batch.table_width;
    const int64_t block = table[position / model_.block_size], slot = position % model_.block_size;
    write_token(cache(layer), block, slot, qkv, kFloat32, model_.heads * dim);
  }

  /// Attention, straight into the inputs of the output layer. Begins and ends with a barrier.
  void mix(const Layer& layer, float* qkv, int index) const {
    if (index == 0) team_.restart();
    team_.barrier();
    const Inputs mixed = buffers_.inputs.of(layer.output);
    Attention& attention = buffers_.attentions[(size_t)attention_index(layer.window)];
    AttentionScratch& scratch = buffers_.scratch[(size_t)index];
    const auto put = [&](int64_t row, int64_t at, V v, int lanes) KVR_HOT { mixed.put(row, at, v, lanes); };
    const Rows q = {qkv, layer.qkv.n, kFloat32};
    for (int64_t i = team_.next(); i < attention.num_items(); i = team_.next())
      attention.work(i, cache(layer), q, scratch, put);
    const Share rows = share(step_.num_tokens, index);
    for (int64_t row = rows.begin; row < rows.end; row++) mixed.pad(row);
    team_.barrier();
    if (!attention.is_split()) return;
    attention.finish(index, team_.size(), scratch, put);
    team_.barrier();
  }

  void feed_forward(const Layer& layer, int index) const {
    const int64_t tokens = step_.num_tokens, ffn = model_.ffn;
    float* gate_up = buffers_.wide.data();
    inputs_for(layer.gate_up, tokens, index, [&](const Inputs& inputs, int64_t row) {
      normalise(layer.post_norm, residual(row), inputs, row);
    });
    linear(layer.gate_up, tokens, gate_up, false, index);
    inputs_for(layer.down, tokens, index, [&](const Inputs& inputs, int64_t row) {
      const float *gate = gate_up + row * 2 * ffn, *up = gate + ffn;
      each(ffn, [&](int64_t i, int lanes) KVR_HOT {
        inputs.put(row, i, silu_times(load_n(gate + i, lanes), load_n(up + i, lanes)), lanes);
      });
    });
    linear(layer.down, tokens, buffers_.residual.data(), true, index);
  }

  void head(int index) const {
    if (step_.num_last == 0) return;
    inputs_for(model_.head, step_.num_last, index, [&](const Inputs& inputs, int64_t row) {
      normalise(model_.final_norm, residual(step_.last_rows[row]), inputs, row);
    });
    linear(model_.head, step_.num_last, step_.logits, false, index);
  }

  const Decoder& model_;
  const Step& step_;
  Team& team_;
  StepBuffers& buffers_;
};

}  // namespace kvrelay
