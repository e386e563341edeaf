// How does project read keys of a native format? As they are.

// Eight elements of a key.
struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Elements 8 × unit .. 8 × unit + 8 of the key of a token of the run.
fn load_key(run: ProjectRun, head: u32, token: u32, unit: u32) -> Eight {
    let format = params.record.format;
    let place = frame_place(params.record, run.frame);
    let quad = place.quad + key_quad(params.record, head, run.slot + token);
    if (format == F32) {
        let low = load_quad(place.slab, quad + 2u * unit);
        let high = load_quad(place.slab, quad + 2u * unit + 1u);
        return Eight(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high));
    }
    let words = load_quad(place.slab, quad + unit);
    if (format == BF16) {
        return Eight(vec4(unpack_pair(words.x), unpack_pair(words.y)), vec4(unpack_pair(words.z), unpack_pair(words.w)));
    }
    let low = words & vec4(0xffffu);
    let high = words >> vec4(16u);
    let a = widen(vec4(low.x, high.x, low.y, high.y), format);
    let b = widen(vec4(low.z, high.z, low.w, high.w), format);
    return Eight(bitcast<vec4<f32>>(a), bitcast<vec4<f32>>(b));
}
