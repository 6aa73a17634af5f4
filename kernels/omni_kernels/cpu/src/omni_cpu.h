// Plain C interface of the CPU kernels. Nothing of torch here: pointers, sizes, dtypes; row-major throughout.
// Every function is reentrant; a call uses `threads` threads and its result does not depend on their number.
#pragma once
#include <stdint.h>

#define OMNI_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// W8A8 and W8A16: int8 weights (-127..127) whose rows are made whole numbers of 8 or 16 bits, one scale a row.
enum omni_dtype { OMNI_F32 = 0, OMNI_BF16 = 1, OMNI_I8 = 2, OMNI_W8A8 = 3, OMNI_W8A16 = 4 };

enum omni_status {
    OMNI_OK = 0,
    OMNI_NO_MEMORY = 1,
    OMNI_BAD_EXPERT = 2,  // an expert id outside -1..E-1
    OMNI_BAD_TOKEN = 3,   // a token id outside 0..vocab-1
    OMNI_BAD_SLOT = 4,    // a slot outside the cache (a step skips negative ones)
    OMNI_BAD_BLOCK = 5,   // a block id outside the cache
    OMNI_BAD_ROW = 6,     // a logit row or a position outside its range
};

// A matrix [n, k] packed into panels of 16 outputs: panel p holds, for each pair of k, 16 x 2 values (bf16) or 2 x 16
// (f32, int8), or for each four k 16 x 4 values (W8A8, W8A16). A gated matrix (n = 2 I) alternates panels of gate rows and
// of up rows. Weights of 8 bits have one scale an output.
typedef struct {
    const void* data;
    const float* scale;
    int64_t n, k;
    int32_t dtype, gated;
} omni_matrix;

typedef struct {
    int64_t experts, top_k, groups, top_groups;
    int32_t sigmoid;       // else softmax
    int32_t renormalise;
    int32_t per_group;     // top_k / groups out of every group (MoGE); else the best groups first (DeepSeek)
    float scale;
    const float* bias;     // [E], added for the choice only; may be null
    int32_t group_best;    // how many of a group's best choices its score sums: 1 or 2
} omni_routing;

// A gated MLP, or `experts` of them one behind the other, plus an optional shared one that takes every row.
typedef struct {
    omni_matrix w13, w2;
    omni_matrix shared13, shared2;  // data null: none
    int64_t experts;
} omni_experts;

// Sequences of a ragged batch. Rows of sequence s are query_start[s] .. query_start[s+1]-1.
typedef struct {
    int64_t sequences;
    const int64_t* query_start;  // [sequences + 1]
    const int64_t* kv_lens;      // [sequences], keys after this step
    const int64_t* tables;       // block ids, sequence s from table_start[s]
    const int64_t* table_start;  // [sequences + 1]
} omni_ragged;

// One layer of a paged cache: keys at `keys`, values at `values`, [blocks, block_size, heads, dim] each.
typedef struct {
    void* keys;
    void* values;
    int64_t blocks, block_size, heads, dim, value_dim;
    int64_t row_stride;  // elements from one token of a head to the next
    int64_t head_stride;
    int32_t dtype;
} omni_cache;

typedef struct {
    const float* attention_norm;  // [H]
    const float* qk_norm;         // [heads + kv_heads, D]; may be null
    const float* qkv_bias;        // [(heads + 2 kv_heads) * D]; may be null
    const float* out_bias;        // [H]; may be null
    const float* mlp_norm;        // [H]
    omni_matrix qkv, out, gate;   // gate.data null: a dense MLP
    omni_experts mlp;
    omni_routing routing;
} omni_layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, vocab, table_len;
    float eps;
    float clip;             // queries, keys and values are cut to -clip..clip; 0: they are not
    int32_t norm_rows;      // qk_norm takes all heads of queries, and of keys, as one row (OLMoE); else head by head
    int32_t embedding_dtype;
    const void* embedding;  // [vocab, H], f32 or bf16, not packed
    const float* cos;       // [table_len, D]
    const float* sin;       // [table_len, D], first half negated
    const float* norm;      // [H]
    omni_matrix head;
    const omni_layer* layer;
} omni_model;

typedef struct {
    int64_t rows, logit_rows;
    const int64_t* tokens;      // [rows]
    const int64_t* positions;   // [rows]
    const int64_t* slots;       // [rows]
    const int64_t* logit_row;   // [logit_rows]
    omni_ragged ragged;
    omni_cache cache;           // of layer 0
    int64_t layer_stride;       // bytes from a layer's keys to the next layer's
    int64_t* expert_tokens;     // [layers, experts], added to; may be null
    float* logits;              // [logit_rows, vocab]
    float* hidden;              // [rows, H], every row after the last norm; may be null
    int64_t* progress;          // layers whose keys and values are in the cache; may be null
    int32_t progress_fd;        // gets a byte for each of them, if progress is not null; must not block
} omni_step_args;

// How the tokens of each sequence are drawn; see omni_sample.
typedef struct {
    const double* temperature;  // [sequences]
    const int64_t* top_k;       // [sequences]
    const double* top_p;        // [sequences]
    const double* uniform;      // [tokens, sequences]: of the first, second ... token that each draws
} omni_draws;

// How drafts are made from the text itself; see `speculation.py` of the engine.
typedef struct {
    int64_t gram;           // last tokens that must occur again
    int64_t longest;        // tokens of a draft
    int64_t first_pause, longest_pause;
    double learn, share;    // share: what a row more costs, in tokens
} omni_policy;

// What a sequence has said, and how its drafts have fared.
typedef struct {
    const int32_t* text;  // [length], the token of the next row is the last
    int64_t length;
    int64_t most;         // tokens that may still come
    int64_t pause, resumes_at;
    double rate;
} omni_said;

typedef struct {
    omni_policy policy;
    omni_said* said;      // [sequences]; changed, but for `text`, as if each had said what is drawn
    int64_t rows;         // of drafts in one step
    double limit_s;       // CPU time of the calling thread that steps may take together; one is always made
} omni_drafts;

// Tokens that end a sequence: those of sequence i lie at [start[i], start[i + 1]).
typedef struct {
    const int64_t* tokens;
    const int64_t* start;  // [sequences + 1]
} omni_ends;

// What a burst tells.
typedef struct {
    int64_t width;         // given: room for so many tokens of a sequence
    int64_t* tokens;       // [sequences, width]
    int64_t* counts;       // [sequences], tokens drawn
    int32_t* fared;        // [steps, sequences, 2]: tokens drafted, and how many were right
    int64_t steps, plain_steps;  // made, and those of them without drafts
    double plain_s, drafted_s;   // CPU time of the calling thread in steps without and with drafts
} omni_told;

OMNI_API int32_t omni_version(void);
OMNI_API const char* omni_source_hash(void);
OMNI_API int32_t omni_isa_count(void);
OMNI_API const char* omni_isa_name(int32_t index);
OMNI_API int32_t omni_isa_usable(int32_t index);
OMNI_API int32_t omni_isa_current(void);
OMNI_API int32_t omni_isa_select(int32_t index);  // 0: done; 1: this machine cannot run it
OMNI_API int32_t omni_use_amx(int32_t on);  // for bfloat16 rows; returns whether it is used from now on

OMNI_API int32_t omni_use_pairs(int32_t on);  // AVX512_BF16 for bfloat16 rows; returns whether it is used from now on
OMNI_API int32_t omni_vnni(void);             // whether it is used
OMNI_API int32_t omni_use_vnni(int32_t on);   // AVX512_VNNI for products of whole numbers; likewise
// Asks for large pages under memory that nothing has written to yet, where the system has them: reads of weights are
// then a fifth to a half faster, since hardware fetches ahead within a page only.
OMNI_API void omni_large_pages(void* data, int64_t bytes);
OMNI_API int64_t omni_packed_bytes(int64_t n, int64_t k, int32_t dtype, int32_t gated);
OMNI_API void omni_pack(const void* src, int64_t n, int64_t k, int32_t dtype, int32_t gated, void* dst);

OMNI_API int32_t omni_linear(const void* x, int32_t x_dtype, int64_t rows, const omni_matrix* w, void* out, int32_t out_dtype,
                    int32_t threads);
OMNI_API int32_t omni_route(const float* logits, int64_t rows, const omni_routing* routing, int64_t* ids, float* weights,
                   int64_t* counts, int32_t threads);
OMNI_API int32_t omni_fused_moe(const void* x, int32_t dtype, int64_t rows, const omni_experts* experts, const int64_t* ids,
                       const float* weights, int64_t top_k, void* out, int32_t threads);
OMNI_API int32_t omni_rms_norm(const void* x, const void* residual, const void* weight, int64_t rows, int64_t width,
                      int64_t weight_rows, float eps, int32_t dtype, void* out, void* total, int32_t threads);
OMNI_API int32_t omni_rope(const void* x, const void* cos, const void* sin, int64_t rows, int64_t heads, int64_t dim,
                  int64_t row_stride, int32_t dtype, void* out, int32_t threads);
OMNI_API int32_t omni_silu_and_mul(const void* x, int64_t rows, int64_t width, int32_t dtype, void* out, int32_t threads);
OMNI_API int32_t omni_attention(const void* q, int32_t dtype, int64_t q_heads, int64_t q_row_stride, const omni_ragged* ragged,
                       const omni_cache* cache, float scale, void* out, int32_t threads);
OMNI_API int32_t omni_kv_write(const omni_cache* cache, const int64_t* slots, int64_t rows, const void* k, const void* v,
                      int64_t k_row_stride, int64_t v_row_stride);
OMNI_API int32_t omni_kv_copy(uint8_t* cache, int64_t planes, int64_t blocks, int64_t block_bytes, const int64_t* ids, int64_t n,
                     uint8_t* data, int32_t to_cache);
OMNI_API int32_t omni_sample(const float* logits, int64_t rows, int64_t vocab, const double* temperature, const int64_t* top_k,
                    const double* top_p, const double* uniform, int64_t* tokens);
OMNI_API int32_t omni_step(const omni_model* model, const omni_step_args* args, int32_t threads);
// Up to `steps` steps of sequences with one row each: every step after `first` takes the tokens that the one before it
// has drawn. With `drafts` rows of what may follow stand beside them, and a sequence goes on as many places as were right,
// and one; it ends early when one sequence has all its tokens, or one of `ends` (null: none). `draws` null: the largest. `first`
// needs no logits.
OMNI_API int32_t omni_burst(const omni_model* model, const omni_step_args* first, const omni_draws* draws,
                            const omni_drafts* drafts, const omni_ends* ends, int64_t steps, omni_told* told,
                            int32_t threads);
OMNI_API int64_t omni_draft(const omni_policy* policy, const omni_said* said, int64_t rows, int32_t* draft);
OMNI_API void omni_drafted(const omni_policy* policy, omni_said* said, int64_t drafted, int64_t right);

OMNI_API double omni_bench_read(const void* data, int64_t bytes, int32_t threads);  // returns a checksum
OMNI_API double omni_bench_fma(int64_t rounds, int32_t threads);                    // returns FLOP done
OMNI_API double omni_bench_pairs(int64_t rounds, int32_t threads);  // likewise, of bfloat16 pairs; 0: no such unit
OMNI_API double omni_bench_quads(int64_t rounds, int32_t threads);  // likewise, of quads of int8

#ifdef __cplusplus
}
#endif
