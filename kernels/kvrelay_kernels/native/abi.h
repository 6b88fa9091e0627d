// What crosses the C boundary: plain structs, mirrored field by field in library.py. Pointers are lent for the call.
#pragma once

#include <cstdint>

namespace kvrelay {

enum ElementType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

/// W [n, k] and an optional bias [n]. Numbers of `type` in panels (linear/panels.h); or, with `code_bits`, codes of 4 or
/// 8 bits in cells (linear/codes.h), which are multiplied like `type`, bfloat16.
struct Matrix {
  const void* data;
  const float* bias;
  int64_t n, k;
  int32_t type;
  int32_t code_bits;                          // 0 without
  int32_t per_row, has_offsets, wide_scales;  // one scale per row, not per 32 k; float32 scales, not float16
};

/// Rows that are looked up, of `size` numbers of `type`; or, with `scales`, of codes of a byte, each `group` of which has
/// one scale and perhaps one offset: w = scale · code + offset.
struct Table {
  const void* data;
  const float* scales;   // [rows, size / group], or null
  const float* offsets;  // likewise
  int64_t size, group;
  int32_t type;
};

/// One layer's paged cache: [blocks, 2, kv_heads, block_size, head_dim], blocks `block_stride` elements apart.
struct Cache {
  void* data;
  int64_t block_stride;
  int64_t kv_heads, block_size, head_dim;
  int32_t type;
};

/// Sequences of a step. Query rows lie one sequence after the other and are each sequence's last tokens.
struct Batch {
  const int32_t* query_lens;
  const int32_t* kv_lens;
  const int32_t* tables;  // [num_sequences, table_width]
  int64_t num_sequences, table_width;
};

/// Rows of vectors: row i, head h at data + i·row_stride + h·head_dim.
struct Rows {
  void* data;
  int64_t row_stride;
  int32_t type;
};

struct Layer {
  const float* input_norm;
  const float* post_norm;
  const float* q_norm;  // null without
  const float* k_norm;
  Matrix qkv, output, gate_up, down;
  void* cache;
  int64_t window;
};

struct Decoder {
  int64_t num_layers, hidden, ffn, heads, kv_heads, head_dim, block_size, block_stride, vocab;
  float eps, scale;
  int32_t kv_type;
  const Layer* layers;
  Table embedding;
  const float* final_norm;
  const float* cos;  // [positions, head_dim], both halves written out, like sin, whose first half is negated
  const float* sin;
  Matrix head;
};

struct Step {
  const int32_t* token_ids;  // [tokens]
  const int32_t* last_rows;  // [num_last]
  float* logits;             // [num_last, vocab]
  int64_t num_tokens, num_last;
  Batch batch;
};

}  // namespace kvrelay
