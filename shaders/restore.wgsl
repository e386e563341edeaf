// What do the codes of a key stand for? Mean + code × row scale × channel scale. `append` and `project` must get the same
// bits, so the sum is an fma: a driver may not choose to make one in this kernel and none in that.

// Eight elements of a key from its codes.
fn restore_key(codes: Eight, row_scale: f32, head: u32, unit: u32) -> Eight {
    return Eight(
        restore_four(codes.a, row_scale, head, 8u * unit),
        restore_four(codes.b, row_scale, head, 8u * unit + 4u),
    );
}

fn restore_four(codes: vec4<f32>, row_scale: f32, head: u32, element: u32) -> vec4<f32> {
    let scale = channel_four(params.record, head, SCALE, element);
    return fma(codes * row_scale, scale, channel_four(params.record, head, MEAN, element));
}
