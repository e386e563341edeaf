// How is a state added to those before it? The first that saw something is taken as it is, one that saw nothing adds nothing,
// and of two that did the outputs and sums are brought to the higher maximum. Every kernel that folds states does it with
// these lines, so who folds them changes no bit. The lanes of the vectors know nothing of each other.

// The maximum of both states, and what their outputs and sums are multiplied by.
struct Step {
    m: vec4<f32>,
    keep: vec4<f32>,
    take: vec4<f32>,
    // Nothing came before, or nothing comes.
    first: vec4<bool>,
    nothing: vec4<bool>,
}

// A state of maximum `other_m` and sum `other_l` comes to those that have `m` and `l`. Nothing was seen where a sum is 0.
fn step_to(m: vec4<f32>, l: vec4<f32>, other_m: vec4<f32>, other_l: vec4<f32>) -> Step {
    let top = max(m, other_m);
    let first = l == vec4(0.0);
    let nothing = other_l == vec4(0.0);
    let higher = select(select(top, other_m, first), m, nothing);
    return Step(higher, weights(m - top), weights(other_m - top), first, nothing);
}

// Sums, or elements of outputs.
fn add(step: Step, mine: vec4<f32>, other: vec4<f32>) -> vec4<f32> {
    let both = fma(mine, step.keep, other * step.take);
    return select(select(both, other, step.first), mine, step.nothing);
}
