// How are the rows of int8 pages read? Eight codes, or two scales, are half a quad; rows start at any half.

// Half a quad of a slab, counted in halves.
fn load_half(slab: u32, half: u32) -> vec2<u32> {
    let quad = load_quad(slab, half >> 1u);
    return select(quad.xy, quad.zw, (half & 1u) == 1u);
}

// The half of the arena's slab that holds a word of a frame.
fn half_of(place: Place, word: u32) -> u32 {
    return 2u * place.quad + (word >> 1u);
}
