// How does attend read pages of a native format? Elements as they are, those of values as zero where they are not finite.

// Dtype::code of the pages.
override page_format: u32;

// Eight consecutive elements of a page row.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Words of two elements each; `zeroing` replaces what is not finite by zero.
fn decode(words: vec2<u32>, zeroing: bool) -> vec4<f32> {
    if (page_format == F16) {
        var low = words & vec2(0xffffu);
        var high = words & vec2(0xffff0000u);
        if (zeroing) {
            low = select(low, vec2(0u), (low & vec2(0x7c00u)) == vec2(0x7c00u));
            high = select(high, vec2(0u), (high & vec2(0x7c000000u)) == vec2(0x7c000000u));
        }
        return vec4(unpack2x16float(low.x | high.x), unpack2x16float(low.y | high.y));
    }
    let low = words << vec2(16u);
    let high = words & vec2(0xffff0000u);
    return as_floats(vec4(low.x, high.x, low.y, high.y), zeroing);
}

fn as_floats(bits: vec4<u32>, zeroing: bool) -> vec4<f32> {
    let special = (bits & vec4(0x7f800000u)) == vec4(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, vec4(0u), special & vec4(zeroing)));
}

// Elements 8 × unit .. 8 × unit + 8 of the row that starts at `quad`.
fn load_eight(slab: u32, quad: u32, unit: u32, zeroing: bool) -> Eight {
    if (page_format == F32) {
        let low = load_quad(slab, quad + 2u * unit);
        let high = load_quad(slab, quad + 2u * unit + 1u);
        return Eight(as_floats(low, zeroing), as_floats(high, zeroing));
    }
    let words = load_quad(slab, quad + unit);
    return Eight(decode(words.xy, zeroing), decode(words.zw, zeroing));
}

fn stage_query(lanes: Lanes, kv_head: u32, element: u32) {
    stage[element] = load_query(lanes, element);
}

// The products of the four queries with the keys of slots `slot` and `slot` + 1.
fn key_products(place: Place, kv_head: u32, slot: u32) -> Dots {
    let record = params.record;
    let key_a = place.quad + key_quad(record, kv_head, slot);
    let key_b = key_a + (record.k_row_words >> 2u);
    var sums = Dots(vec4(0.0), vec4(0.0));
    let units = record.k_dim >> 3u;
    for (var unit = 0u; unit < units; unit++) {
        let eight_a = load_eight(place.slab, key_a, unit, false);
        let eight_b = load_eight(place.slab, key_b, unit, false);
        let dots = dot_eight(eight_a, eight_b, 8u * unit);
        sums.a += dots.a;
        sums.b += dots.b;
    }
    return sums;
}

fn load_value(place: Place, kv_head: u32, slot: u32, unit: u32) -> Eight {
    return load_eight(place.slab, place.quad + value_quad(params.record, kv_head, slot), unit, true);
}

// Values have no scales, and are weighted by the softmax as it is.
const WEIGHTS_ARE_STAGED = false;

fn load_value_scales(place: Place, kv_head: u32, slot: u32) -> vec2<f32> {
    return vec2(1.0);
}

fn stage_weights(token: u32, p_a: vec4<f32>, p_b: vec4<f32>, scales: vec2<f32>) {}

fn value_weight(token: u32) -> vec4<f32> {
    return scores[token];
}

// Scores lack nothing.
fn stage_constant(thread: u32) {}

fn sum_constant() -> vec4<f32> {
    return vec4(0.0);
}
