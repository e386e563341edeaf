// How do new tokens get into pages? Each thread writes eight elements of a key or value row: one or two quads.

struct AppendParams {
    record: RecordParams,
    k: ViewParams,
    v: ViewParams,
    dtype: u32,
    runs_at: u32,
    runs: u32,
    write: u32,
}

struct AppendRun {
    k_offset: u32,
    v_offset: u32,
    frame: u32,
    slot: u32,
    tokens: u32,
}

@group(0) @binding(0) var<uniform> params: AppendParams;
@group(1) @binding(0) var<storage, read> k_source: array<u32>;
@group(1) @binding(1) var<storage, read> v_source: array<u32>;
@group(1) @binding(2) var<storage, read_write> non_finite: atomic<u32>;

fn load_run(at: u32) -> AppendRun {
    return AppendRun(descriptors[at], descriptors[at + 1u], descriptors[at + 2u], descriptors[at + 3u], descriptors[at + 4u]);
}

fn source_bits(is_value: bool, index: u32) -> u32 {
    let at = word_of(index, params.dtype);
    var word: u32;
    if (is_value) {
        word = v_source[at];
    } else {
        word = k_source[at];
    }
    return bits_in(word, index, params.dtype);
}

// Four elements, `step` apart.
fn source_four(is_value: bool, index: u32, step: u32) -> vec4<u32> {
    return vec4(
        source_bits(is_value, index),
        source_bits(is_value, index + step),
        source_bits(is_value, index + 2u * step),
        source_bits(is_value, index + 3u * step),
    );
}

// Writes elements 8 × unit .. 8 × unit + 8 of one row, and says how many of them are not finite.
fn append_unit(run: AppendRun, is_value: bool, row: u32, unit: u32) -> u32 {
    let record = params.record;
    let token = row % run.tokens;
    let head = row / run.tokens;
    var view = params.k;
    var first = run.k_offset;
    var quad = key_quad(record, head, run.slot + token);
    if (is_value) {
        view = params.v;
        first = run.v_offset;
        quad = value_quad(record, head, run.slot + token);
    }
    let index = first + element_at(view, token, head, unit * 8u);
    let low = source_four(is_value, index, view.element);
    let high = source_four(is_value, index + 4u * view.element, view.element);
    if (params.write == 1u) {
        let place = frame_place(record, run.frame);
        let a = convert(low, params.dtype, record.format);
        let b = convert(high, params.dtype, record.format);
        if (record.format == F32) {
            store_quad(place.slab, place.quad + quad + 2u * unit, a);
            store_quad(place.slab, place.quad + quad + 2u * unit + 1u, b);
        } else {
            let words = vec4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
            store_quad(place.slab, place.quad + quad + unit, words);
        }
    }
    return count_non_finite(low, params.dtype) + count_non_finite(high, params.dtype);
}

// Workgroups: y and z number the run, x strides over its units, all of K before all of V.
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
    let rows = params.record.kv_heads * run.tokens;
    let k_row_units = params.record.k_dim >> 3u;
    let v_row_units = params.record.v_dim >> 3u;
    let k_units = rows * k_row_units;
    let units = k_units + rows * v_row_units;
    var bad = 0u;
    for (var at = group.x * 64u + thread; at < units; at += groups.x * 64u) {
        let is_value = at >= k_units;
        let row_units = select(k_row_units, v_row_units, is_value);
        let local = at - select(0u, k_units, is_value);
        bad += append_unit(run, is_value, local / row_units, local % row_units);
    }
    if (bad > 0u) {
        atomicAdd(&non_finite, bad);
    }
}
