// Which structs do host and kernels share? The CUDA side of src/backend/params.rs, where every field is described.
// tests/cuda_build.rs compares the sizes and offsets asserted below with `params::layouts()`.
#pragma once
#include <cstddef>
#include <cstdint>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

#define KV_SIZE(type, bytes) static_assert(sizeof(type) == bytes, "size of " #type)
#define KV_FIELD(type, field, offset) static_assert(offsetof(type, field) == offset, "offset of " #type "." #field)

struct RecordParams {
    u32 page_shift, kv_heads, k_dim, v_dim, k_row_words, v_row_words, v_base_words, record_words, frame_words;
    u32 slab_shift, format, scale_base_words;
};
KV_SIZE(RecordParams, 48);
KV_FIELD(RecordParams, page_shift, 0);
KV_FIELD(RecordParams, kv_heads, 4);
KV_FIELD(RecordParams, k_dim, 8);
KV_FIELD(RecordParams, v_dim, 12);
KV_FIELD(RecordParams, k_row_words, 16);
KV_FIELD(RecordParams, v_row_words, 20);
KV_FIELD(RecordParams, v_base_words, 24);
KV_FIELD(RecordParams, record_words, 28);
KV_FIELD(RecordParams, frame_words, 32);
KV_FIELD(RecordParams, slab_shift, 36);
KV_FIELD(RecordParams, format, 40);
KV_FIELD(RecordParams, scale_base_words, 44);

struct ViewParams {
    u32 base, row, head, element;
};
KV_SIZE(ViewParams, 16);
KV_FIELD(ViewParams, base, 0);
KV_FIELD(ViewParams, row, 4);
KV_FIELD(ViewParams, head, 8);
KV_FIELD(ViewParams, element, 12);

struct AppendParams {
    RecordParams record;
    ViewParams k, v;
    u32 dtype, runs_at, runs, write;
};
KV_SIZE(AppendParams, 96);
KV_FIELD(AppendParams, record, 0);
KV_FIELD(AppendParams, k, 48);
KV_FIELD(AppendParams, v, 64);
KV_FIELD(AppendParams, dtype, 80);
KV_FIELD(AppendParams, runs_at, 84);
KV_FIELD(AppendParams, runs, 88);
KV_FIELD(AppendParams, write, 92);

struct AppendRun {
    u32 k_offset, v_offset, frame, slot, tokens, page, reserved[2];
};
KV_SIZE(AppendRun, 32);
KV_FIELD(AppendRun, k_offset, 0);
KV_FIELD(AppendRun, v_offset, 4);
KV_FIELD(AppendRun, frame, 8);
KV_FIELD(AppendRun, slot, 12);
KV_FIELD(AppendRun, tokens, 16);
KV_FIELD(AppendRun, page, 20);
KV_FIELD(AppendRun, reserved, 24);

struct TransferParams {
    RecordParams record;
    u32 from_base, from_stride, to_base, to_stride, moves_at, moves, reserved[2];
};
KV_SIZE(TransferParams, 80);
KV_FIELD(TransferParams, record, 0);
KV_FIELD(TransferParams, from_base, 48);
KV_FIELD(TransferParams, from_stride, 52);
KV_FIELD(TransferParams, to_base, 56);
KV_FIELD(TransferParams, to_stride, 60);
KV_FIELD(TransferParams, moves_at, 64);
KV_FIELD(TransferParams, moves, 68);
KV_FIELD(TransferParams, reserved, 72);

struct Move {
    u32 from, to;
};
KV_SIZE(Move, 8);
KV_FIELD(Move, from, 0);
KV_FIELD(Move, to, 4);

struct AttendParams {
    RecordParams record;
    ViewParams q;
    u32 q_dtype, q_heads, group, split_shift;
    float scale_log2;
    u32 tiles_at, tiles, rows_at, items, state_words, query_tile, first_item;
};
KV_SIZE(AttendParams, 112);
KV_FIELD(AttendParams, record, 0);
KV_FIELD(AttendParams, q, 48);
KV_FIELD(AttendParams, q_dtype, 64);
KV_FIELD(AttendParams, q_heads, 68);
KV_FIELD(AttendParams, group, 72);
KV_FIELD(AttendParams, split_shift, 76);
KV_FIELD(AttendParams, scale_log2, 80);
KV_FIELD(AttendParams, tiles_at, 84);
KV_FIELD(AttendParams, tiles, 88);
KV_FIELD(AttendParams, rows_at, 92);
KV_FIELD(AttendParams, items, 96);
KV_FIELD(AttendParams, state_words, 100);
KV_FIELD(AttendParams, query_tile, 104);
KV_FIELD(AttendParams, first_item, 108);

struct Tile {
    u32 table, row, rows, split, splits, item, reserved[2];
};
KV_SIZE(Tile, 32);
KV_FIELD(Tile, table, 0);
KV_FIELD(Tile, row, 4);
KV_FIELD(Tile, rows, 8);
KV_FIELD(Tile, split, 12);
KV_FIELD(Tile, splits, 16);
KV_FIELD(Tile, item, 20);
KV_FIELD(Tile, reserved, 24);

struct Row {
    u32 start, end, state, split;
};
KV_SIZE(Row, 16);
KV_FIELD(Row, start, 0);
KV_FIELD(Row, end, 4);
KV_FIELD(Row, state, 8);
KV_FIELD(Row, split, 12);

struct MergeParams {
    ViewParams out, lse;
    u32 out_dtype, q_heads, v_dim, state_words, rows_at, rows, with_lse, section;
};
KV_SIZE(MergeParams, 64);
KV_FIELD(MergeParams, out, 0);
KV_FIELD(MergeParams, lse, 16);
KV_FIELD(MergeParams, out_dtype, 32);
KV_FIELD(MergeParams, q_heads, 36);
KV_FIELD(MergeParams, v_dim, 40);
KV_FIELD(MergeParams, state_words, 44);
KV_FIELD(MergeParams, rows_at, 48);
KV_FIELD(MergeParams, rows, 52);
KV_FIELD(MergeParams, with_lse, 56);
KV_FIELD(MergeParams, section, 60);

struct MergeRow {
    u32 state, states, before;
};
KV_SIZE(MergeRow, 12);
KV_FIELD(MergeRow, state, 0);
KV_FIELD(MergeRow, states, 4);
KV_FIELD(MergeRow, before, 8);

struct FoldParams {
    u32 q_heads, v_dim, state_words, rows_at, rows, reserved[3];
};
KV_SIZE(FoldParams, 32);
KV_FIELD(FoldParams, q_heads, 0);
KV_FIELD(FoldParams, v_dim, 4);
KV_FIELD(FoldParams, state_words, 8);
KV_FIELD(FoldParams, rows_at, 12);
KV_FIELD(FoldParams, rows, 16);
KV_FIELD(FoldParams, reserved, 20);

struct FoldRow {
    u32 state, states, to, reserved;
};
KV_SIZE(FoldRow, 16);
KV_FIELD(FoldRow, state, 0);
KV_FIELD(FoldRow, states, 4);
KV_FIELD(FoldRow, to, 8);
KV_FIELD(FoldRow, reserved, 12);
struct ProjectionParams {
    u32 page_shift, kv_heads, rank, key_words, norm_base_words, record_words, slab_shift, reserved;
};
KV_SIZE(ProjectionParams, 32);
KV_FIELD(ProjectionParams, page_shift, 0);
KV_FIELD(ProjectionParams, kv_heads, 4);
KV_FIELD(ProjectionParams, rank, 8);
KV_FIELD(ProjectionParams, key_words, 12);
KV_FIELD(ProjectionParams, norm_base_words, 16);
KV_FIELD(ProjectionParams, record_words, 20);
KV_FIELD(ProjectionParams, slab_shift, 24);
KV_FIELD(ProjectionParams, reserved, 28);

struct ProjectParams {
    RecordParams record;
    ProjectionParams projections;
    u32 basis_base, basis_stride, runs_at, runs;
};
KV_SIZE(ProjectParams, 96);
KV_FIELD(ProjectParams, record, 0);
KV_FIELD(ProjectParams, projections, 48);
KV_FIELD(ProjectParams, basis_base, 80);
KV_FIELD(ProjectParams, basis_stride, 84);
KV_FIELD(ProjectParams, runs_at, 88);
KV_FIELD(ProjectParams, runs, 92);

struct AppendProjectParams {
    RecordParams record;
    ViewParams k, v;
    ProjectionParams projections;
    u32 basis_base, basis_stride, dtype, runs_at, runs, reserved[3];
};
KV_SIZE(AppendProjectParams, 144);
KV_FIELD(AppendProjectParams, record, 0);
KV_FIELD(AppendProjectParams, k, 48);
KV_FIELD(AppendProjectParams, v, 64);
KV_FIELD(AppendProjectParams, projections, 80);
KV_FIELD(AppendProjectParams, basis_base, 112);
KV_FIELD(AppendProjectParams, basis_stride, 116);
KV_FIELD(AppendProjectParams, dtype, 120);
KV_FIELD(AppendProjectParams, runs_at, 124);
KV_FIELD(AppendProjectParams, runs, 128);
KV_FIELD(AppendProjectParams, reserved, 132);

struct ProjectRun {
    u32 frame, page, slot, tokens;
};
KV_SIZE(ProjectRun, 16);
KV_FIELD(ProjectRun, frame, 0);
KV_FIELD(ProjectRun, page, 4);
KV_FIELD(ProjectRun, slot, 8);
KV_FIELD(ProjectRun, tokens, 12);

struct QueryParams {
    ViewParams q;
    u32 q_dtype, q_heads, group, k_dim, rank, basis_base, basis_stride, rows;
};
KV_SIZE(QueryParams, 48);
KV_FIELD(QueryParams, q, 0);
KV_FIELD(QueryParams, q_dtype, 16);
KV_FIELD(QueryParams, q_heads, 20);
KV_FIELD(QueryParams, group, 24);
KV_FIELD(QueryParams, k_dim, 28);
KV_FIELD(QueryParams, rank, 32);
KV_FIELD(QueryParams, basis_base, 36);
KV_FIELD(QueryParams, basis_stride, 40);
KV_FIELD(QueryParams, rows, 44);

struct ScoreParams {
    ProjectionParams projections;
    u32 q_heads, group, entries_at, entries;
};
KV_SIZE(ScoreParams, 48);
KV_FIELD(ScoreParams, projections, 0);
KV_FIELD(ScoreParams, q_heads, 32);
KV_FIELD(ScoreParams, group, 36);
KV_FIELD(ScoreParams, entries_at, 40);
KV_FIELD(ScoreParams, entries, 44);

struct ScoreEntry {
    u32 page, row, tokens, reserved;
};
KV_SIZE(ScoreEntry, 16);
KV_FIELD(ScoreEntry, page, 0);
KV_FIELD(ScoreEntry, row, 4);
KV_FIELD(ScoreEntry, tokens, 8);
KV_FIELD(ScoreEntry, reserved, 12);
