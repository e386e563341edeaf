// How does project read int8 keys? As what they stand for: mean + code × row scale × channel scale.

// Elements 8 × unit .. 8 × unit + 8 of a key.
fn load_key(place: Place, head: u32, slot: u32, unit: u32) -> Eight {
    let record = params.record;
    let codes = eight_codes(load_half(place.slab, half_of(place, key_word(record, head, slot)) + unit));
    let word = key_scale_word(record, head, slot);
    let scales = bitcast<vec2<f32>>(load_half(place.slab, half_of(place, word)));
    let row_scale = select(scales.x, scales.y, (word & 1u) == 1u);
    return Eight(
        restore(codes.a, row_scale, head, 8u * unit),
        restore(codes.b, row_scale, head, 8u * unit + 4u),
    );
}

fn restore(codes: vec4<f32>, row_scale: f32, head: u32, element: u32) -> vec4<f32> {
    let scale = channel_four(params.record, head, SCALE, element);
    return channel_four(params.record, head, MEAN, element) + codes * row_scale * scale;
}
