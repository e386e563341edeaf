// How does attend read pages of a native format? Elements as they are, those of values as zero where they are not finite and
// some query does not see them.

// Dtype::code of the pages.
override page_format: u32;

// Eight consecutive elements of a page row.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Eight elements of four rows: two in a word, or, of f32, four in `low` and four in `high`.
struct Rows {
    low: Four,
    high: Four,
}

// Lane `lane`'s elements of the row that starts `word` words into a frame, and of the next three.
fn load_rows(place: Place, word: u32, stride: u32, lane: u32) -> Rows {
    let quad = place.quad + (word >> 2u);
    if (page_format == F32) {
        let low = load_four(place.slab, quad + 2u * lane, stride >> 2u);
        return Rows(low, load_four(place.slab, quad + 2u * lane + 1u, stride >> 2u));
    }
    return Rows(load_four(place.slab, quad + lane, stride >> 2u), Four());
}

fn eight(low: vec4<u32>, high: vec4<u32>) -> Eight {
    if (page_format == F32) {
        return Eight(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high));
    }
    if (page_format == F16) {
        return Eight(
            vec4(unpack2x16float(low.x), unpack2x16float(low.y)),
            vec4(unpack2x16float(low.z), unpack2x16float(low.w)),
        );
    }
    let even = bitcast<vec4<f32>>(low << vec4(16u));
    let odd = bitcast<vec4<f32>>(low & vec4(0xffff0000u));
    return Eight(vec4(even.x, odd.x, even.y, odd.y), vec4(even.z, odd.z, even.w, odd.w));
}

fn eight_a(rows: Rows) -> Eight {
    return eight(rows.low.a, rows.high.a);
}

fn eight_b(rows: Rows) -> Eight {
    return eight(rows.low.b, rows.high.b);
}

fn eight_c(rows: Rows) -> Eight {
    return eight(rows.low.c, rows.high.c);
}

fn eight_d(rows: Rows) -> Eight {
    return eight(rows.low.d, rows.high.d);
}

// Zero for what is infinite or NaN.
fn finite_words(words: vec4<u32>) -> vec4<u32> {
    if (page_format == F32) {
        return select(words, vec4(0u), (words & vec4(0x7f800000u)) == vec4(0x7f800000u));
    }
    let exponent = select(0x7f80u, 0x7c00u, page_format == F16);
    let low = words & vec4(0xffffu);
    let high = words >> vec4(16u);
    return select(low, vec4(0u), (low & vec4(exponent)) == vec4(exponent))
        | (select(high, vec4(0u), (high & vec4(exponent)) == vec4(exponent)) << vec4(16u));
}

const VALUES_ARE_FINITE = false;

// Lane `lane`'s elements of one row.
fn load_finite(place: Place, word: u32, lane: u32) -> Eight {
    let quad = place.quad + (word >> 2u);
    if (page_format == F32) {
        let low = finite_words(load_quad(place.slab, quad + 2u * lane));
        return eight(low, finite_words(load_quad(place.slab, quad + 2u * lane + 1u)));
    }
    return eight(finite_words(load_quad(place.slab, quad + lane)), vec4(0u));
}

fn stage_query(lanes: Lanes, kv_head: u32, element: u32) {
    asked[asked_at(element)] = load_query(lanes, element);
}

// Keys lack nothing, and rows have no scales.
const KEYS_HAVE_MEANS = false;

fn sum_products(thread: u32) {}

fn product() -> vec4<f32> {
    return vec4(0.0);
}

fn load_scales(tile: Tile, kv_head: u32, first: u32, span: Span, thread: u32) -> Scales {
    return Scales(vec2(1.0), vec2(1.0));
}

fn weigh_value(p: vec4<f32>, scale: f32) -> vec4<f32> {
    return p;
}
