// How do the states of an output row fold into its output? Those of a section in order, then the sections in order; each
// thread has four elements of one head.

struct MergeParams {
    out: ViewParams,
    lse: ViewParams,
    out_dtype: u32,
    q_heads: u32,
    v_dim: u32,
    state_words: u32,
    rows_at: u32,
    rows: u32,
    with_lse: u32,
    section: u32,
}

struct MergeRow {
    state: u32,
    states: u32,
    before: u32,
}

@group(0) @binding(0) var<uniform> params: MergeParams;
@group(1) @binding(0) var<storage, read> states: array<f32>;
@group(1) @binding(1) var<storage, read_write> out: array<u32>;
@group(1) @binding(2) var<storage, read_write> lse: array<u32>;

const LN_2 = 0.69314718;
// Minus infinity, written as bits because no kernel may compute it.
const MINUS_INFINITY = 0xff800000u;

fn load_merge_row(at: u32) -> MergeRow {
    return MergeRow(descriptors[at], descriptors[at + 1u], descriptors[at + 2u]);
}

fn store_four(index: u32, value: vec4<f32>) {
    let bits = narrow(bitcast<vec4<u32>>(value), params.out_dtype);
    if (params.out_dtype == F32) {
        out[index] = bits.x;
        out[index + 1u] = bits.y;
        out[index + 2u] = bits.z;
        out[index + 3u] = bits.w;
    } else {
        out[index >> 1u] = pack(bits.x, bits.y);
        out[(index >> 1u) + 1u] = pack(bits.z, bits.w);
    }
}

fn fold_sections(sources: MergeRow, head: u32, element: u32) -> Total {
    var total = nothing();
    var section = nothing();
    // States that the section still lacks.
    var missing = params.section - sources.before;
    for (var i = 0u; i < sources.states; i++) {
        section = plus(section, load_state(sources.state + i, head, element));
        missing -= 1u;
        if (missing == 0u) {
            total = plus(total, section);
            section = nothing();
            missing = params.section;
        }
    }
    return plus(total, section);
}

@compute @workgroup_size(64)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = (group.y * FOLD + group.x) * 64u + thread;
    let chunks = params.v_dim >> 2u;
    let element = (number % chunks) << 2u;
    let head = (number / chunks) % params.q_heads;
    let row = (number / chunks) / params.q_heads;
    if (row >= params.rows) {
        return;
    }
    let sources = load_merge_row(params.rows_at + 3u * row);
    let total = fold_sections(sources, head, element);
    let empty = total.l == 0.0;
    let divisor = select(total.l, 1.0, empty);
    store_four(element_at(params.out, row, head, element), select(total.o / divisor, vec4(0.0), empty));
    if (params.with_lse == 1u && element == 0u) {
        let bits = bitcast<u32>((total.m + log2(divisor) + total.c) * LN_2);
        lse[element_at(params.lse, row, head, 0u)] = select(bits, MINUS_INFINITY, empty);
    }
}
