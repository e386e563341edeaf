// What do attend and merge share of the softmax? Powers of two of differences that are never positive.

// 2^x, exactly 1 at 0 on every driver.
fn weights(x: vec4<f32>) -> vec4<f32> {
    return select(exp2(min(x, vec4(0.0))), vec4(1.0), x >= vec4(0.0));
}

fn weight(x: f32) -> f32 {
    return weights(vec4(x)).x;
}
