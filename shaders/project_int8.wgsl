// How does project read int8 keys? Codes and the scale of their row from the page.

// Elements 8 × unit .. 8 × unit + 8 of the key of a token of the run.
fn load_key(run: ProjectRun, head: u32, token: u32, unit: u32) -> Eight {
    let record = params.record;
    let place = frame_place(record, run.frame);
    let slot = run.slot + token;
    let codes = eight_codes(load_half(place.slab, half_of(place, key_word(record, head, slot)) + unit));
    let word = key_scale_word(record, head, slot);
    let scales = bitcast<vec2<f32>>(load_half(place.slab, half_of(place, word)));
    return restore_key(codes, select(scales.x, scales.y, (word & 1u) == 1u), head, unit);
}
