// How are the rows of int8 pages read? Eight codes, or two scales, are half a quad; rows start at any half.

// Eight consecutive codes of a row, as numbers.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Half a quad of a slab, counted in halves.
fn load_half(slab: u32, half: u32) -> vec2<u32> {
    let quad = load_quad(slab, half >> 1u);
    return select(quad.xy, quad.zw, (half & 1u) == 1u);
}

fn four_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(vec4(word) << vec4(24u, 16u, 8u, 0u)) >> vec4(24u));
}

fn eight_codes(words: vec2<u32>) -> Eight {
    return Eight(four_codes(words.x), four_codes(words.y));
}

// The half of the arena's slab that holds a word of a frame.
fn half_of(place: Place, word: u32) -> u32 {
    return 2u * place.quad + (word >> 1u);
}
