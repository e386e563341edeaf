// How do weighted values become the outputs of a split? A thread adds up eight elements over its tokens, for four queries; then
// the threads that have the same elements hand over to each other through `stage`, eight vectors for each of FOLDING.

const FOLDING = 64u;
// Vectors from an element to the next: those that are read together are in different banks.
const APART = 65u;

// Eight elements of the outputs.
struct Outputs {
    o0: vec4<f32>,
    o1: vec4<f32>,
    o2: vec4<f32>,
    o3: vec4<f32>,
    o4: vec4<f32>,
    o5: vec4<f32>,
    o6: vec4<f32>,
    o7: vec4<f32>,
}

// A token more: its eight elements and its weights.
fn add_value(outputs: Outputs, value: Eight, w: vec4<f32>) -> Outputs {
    return Outputs(
        fma(w, vec4(value.a.x), outputs.o0),
        fma(w, vec4(value.a.y), outputs.o1),
        fma(w, vec4(value.a.z), outputs.o2),
        fma(w, vec4(value.a.w), outputs.o3),
        fma(w, vec4(value.b.x), outputs.o4),
        fma(w, vec4(value.b.y), outputs.o5),
        fma(w, vec4(value.b.z), outputs.o6),
        fma(w, vec4(value.b.w), outputs.o7),
    );
}

fn leave(outputs: Outputs, at: u32) {
    stage[at] = outputs.o0;
    stage[at + APART] = outputs.o1;
    stage[at + 2u * APART] = outputs.o2;
    stage[at + 3u * APART] = outputs.o3;
    stage[at + 4u * APART] = outputs.o4;
    stage[at + 5u * APART] = outputs.o5;
    stage[at + 6u * APART] = outputs.o6;
    stage[at + 7u * APART] = outputs.o7;
}

fn add_left(outputs: Outputs, at: u32) -> Outputs {
    return Outputs(
        outputs.o0 + stage[at],
        outputs.o1 + stage[at + APART],
        outputs.o2 + stage[at + 2u * APART],
        outputs.o3 + stage[at + 3u * APART],
        outputs.o4 + stage[at + 4u * APART],
        outputs.o5 + stage[at + 5u * APART],
        outputs.o6 + stage[at + 6u * APART],
        outputs.o7 + stage[at + 7u * APART],
    );
}

// The sum of what is left of an element.
fn left_element(element: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var at = element >> 3u; at < FOLDING; at += v_lanes()) {
        sum += stage[(element & 7u) * APART + at];
    }
    return sum;
}
