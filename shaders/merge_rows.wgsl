// What do the kernels of merge share? The rows, and how what their states have come to is written.

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
@group(1) @binding(0) var<storage, read> states: array<vec4<f32>>;
@group(1) @binding(1) var<storage, read_write> out: array<u32>;
@group(1) @binding(2) var<storage, read_write> lse: array<u32>;

const LN_2 = 0.69314718;
// Minus infinity, written as bits because no kernel may compute it.
const MINUS_INFINITY = 0xff800000u;

fn load_merge_row(row: u32) -> MergeRow {
    let at = params.rows_at + 3u * row;
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

// Writes elements `element` and on of an output, and with the first of them the log-sum-exp.
fn write_output(total: Total, row: u32, head: u32, element: u32) {
    let empty = total.l == 0.0;
    let divisor = select(total.l, 1.0, empty);
    store_four(element_at(params.out, row, head, element), select(total.o / divisor, vec4(0.0), empty));
    if (params.with_lse == 1u && element == 0u) {
        let bits = bitcast<u32>((total.m + log2(divisor) + total.c) * LN_2);
        lse[element_at(params.lse, row, head, 0u)] = select(bits, MINUS_INFINITY, empty);
    }
}
