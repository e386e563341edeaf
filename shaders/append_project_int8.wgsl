// How do new tokens get into int8 pages while their keys are projected? A workgroup takes the keys or the values of eight
// tokens of one run and KV head and writes them as append_int8.wgsl does. It keeps the codes of keys, and projects what they
// stand for as project.wgsl does with the codes of a page.

struct AppendProjectParams {
    record: RecordParams,
    k: ViewParams,
    v: ViewParams,
    projections: ProjectionParams,
    basis_base: u32,
    basis_stride: u32,
    dtype: u32,
    runs_at: u32,
    runs: u32,
    reserved0: u32,
    reserved1: u32,
    reserved2: u32,
}

@group(0) @binding(0) var<uniform> params: AppendProjectParams;
@group(1) @binding(3) var<storage, read> basis: array<u32>;
// One slab of records: the host makes a call for each.
@group(1) @binding(4) var<storage, read_write> projected: array<u32>;

const THREADS = 64u;
// Units of the longest key.
const UNITS = 32u;

// What a workgroup has written of the keys of a tile: [row][unit], and the scales of the rows.
var<workgroup> tile_codes: array<vec2<u32>, 256>;
var<workgroup> tile_scales: array<f32, 8>;

// Elements 8 × unit .. 8 × unit + 8 of the key of a token of the run, which is one of the tile.
fn load_key(run: ProjectRun, head: u32, token: u32, unit: u32) -> Eight {
    let row = token % TILE;
    return restore_key(eight_codes(tile_codes[UNITS * row + unit]), tile_scales[row], head, unit);
}

// Workgroups: y and z number the run, x strides over its KV heads and tiles, all of K before all of V.
@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = group.z * FOLD + group.y;
    if (number >= params.runs) {
        return;
    }
    let run = load_run(params.runs_at + 8u * number);
    let key_run = ProjectRun(run.frame, run.page, run.slot, run.tokens);
    let tiles = (run.tokens + TILE - 1u) / TILE;
    let key_tiles = tiles * params.record.kv_heads;
    var bad = 0u;
    for (var work = group.x; work < 2u * key_tiles; work += groups.x) {
        let is_value = work >= key_tiles;
        let head = (work - select(0u, key_tiles, is_value)) / tiles;
        let first = work % tiles * TILE;
        let rows = min(TILE, run.tokens - first);
        let dim = select(params.record.k_dim, params.record.v_dim, is_value);
        let shift = row_shift(dim);
        let unit = thread & ((1u << shift) - 1u);
        for (var start = 0u; start < rows; start += THREADS >> shift) {
            let row = start + (thread >> shift);
            let takes_part = row < rows && unit < (dim >> 3u);
            var eight = UnitBits(vec4(0u), vec4(0u));
            if (takes_part) {
                let source = source_eight(run, is_value, first + row, head, unit);
                bad += count_eight(source);
                eight = prepare(source, is_value, head, unit);
            }
            // The first barrier lets the rows before these read what this overwrites.
            workgroupBarrier();
            largest[thread] = largest_of(eight);
            workgroupBarrier();
            if (takes_part) {
                let bits = row_largest(thread, shift);
                let codes = unit_codes(eight, bits);
                store_codes(run, is_value, first + row, head, unit, codes, scale_of(bits));
                if (!is_value) {
                    tile_codes[UNITS * row + unit] = codes;
                    if (unit == 0u) {
                        tile_scales[row] = scale_of(bits);
                    }
                }
            }
        }
        if (!is_value) {
            workgroupBarrier();
            for (var i = thread; i < (params.record.k_dim >> 2u); i += THREADS) {
                stage_part(key_run, head, first, i);
            }
            workgroupBarrier();
            for (var i = thread; i < params.projections.rank; i += THREADS) {
                project_part(key_run, head, first, i);
            }
        }
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
