// How are rows of new tokens read whose elements lie side by side, from multiples of 16 bytes on? A quad at once.

@group(1) @binding(0) var<storage, read> k_source: array<vec4<u32>>;
@group(1) @binding(1) var<storage, read> v_source: array<vec4<u32>>;

fn source_quad(is_value: bool, at: u32) -> vec4<u32> {
    if (is_value) {
        return v_source[at];
    }
    return k_source[at];
}

// The index of element 8 × unit of a token and head.
fn source_at(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32) -> u32 {
    if (is_value) {
        return run.v_offset + element_at(params.v, token, head, unit * 8u);
    }
    return run.k_offset + element_at(params.k, token, head, unit * 8u);
}

// Eight elements of sixteen bits, two in a word.
fn source_pairs(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32) -> vec4<u32> {
    return source_quad(is_value, source_at(run, is_value, token, head, unit) >> 3u);
}

// Elements 8 × unit .. 8 × unit + 8 of a token and head.
fn source_eight(run: AppendRun, is_value: bool, token: u32, head: u32, unit: u32) -> UnitBits {
    let index = source_at(run, is_value, token, head, unit);
    if (params.dtype == F32) {
        return UnitBits(source_quad(is_value, index >> 2u), source_quad(is_value, (index >> 2u) + 1u));
    }
    let words = source_quad(is_value, index >> 3u);
    let low = words & vec4(0xffffu);
    let high = words >> vec4(16u);
    return UnitBits(vec4(low.x, high.x, low.y, high.y), vec4(low.z, high.z, low.w, high.w));
}
