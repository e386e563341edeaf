// How are the rows of int8 pages read? Eight codes, or two scales, are half a quad; rows start at any half.

// The half of the arena's slab that holds a word of a frame.
fn half_of(place: Place, word: u32) -> u32 {
    return 2u * place.quad + (word >> 1u);
}
