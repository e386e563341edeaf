// How do weighted values become the outputs of a split? Threads are groups of units: a thread adds up eight elements over the
// tokens of its group, for four queries, and then the groups hand over to each other through `stage`, whose first part is
// nine vectors for each of 64 threads.

const FOLDING = 64u;

// Eight elements of the outputs, and the sum of the weights.
struct Outputs {
    o0: vec4<f32>,
    o1: vec4<f32>,
    o2: vec4<f32>,
    o3: vec4<f32>,
    o4: vec4<f32>,
    o5: vec4<f32>,
    o6: vec4<f32>,
    o7: vec4<f32>,
    sum: vec4<f32>,
}

// A token more: its eight elements, the weight of its value, and that of the softmax.
fn add_value(outputs: Outputs, value: Eight, w: vec4<f32>, p: vec4<f32>) -> Outputs {
    return Outputs(
        fma(w, vec4(value.a.x), outputs.o0),
        fma(w, vec4(value.a.y), outputs.o1),
        fma(w, vec4(value.a.z), outputs.o2),
        fma(w, vec4(value.a.w), outputs.o3),
        fma(w, vec4(value.b.x), outputs.o4),
        fma(w, vec4(value.b.y), outputs.o5),
        fma(w, vec4(value.b.z), outputs.o6),
        fma(w, vec4(value.b.w), outputs.o7),
        outputs.sum + p,
    );
}

fn leave(outputs: Outputs, at: u32) {
    stage[at] = outputs.o0;
    stage[at + FOLDING] = outputs.o1;
    stage[at + 2u * FOLDING] = outputs.o2;
    stage[at + 3u * FOLDING] = outputs.o3;
    stage[at + 4u * FOLDING] = outputs.o4;
    stage[at + 5u * FOLDING] = outputs.o5;
    stage[at + 6u * FOLDING] = outputs.o6;
    stage[at + 7u * FOLDING] = outputs.o7;
    stage[at + 8u * FOLDING] = outputs.sum;
}

fn add_left(outputs: Outputs, at: u32) -> Outputs {
    return Outputs(
        outputs.o0 + stage[at],
        outputs.o1 + stage[at + FOLDING],
        outputs.o2 + stage[at + 2u * FOLDING],
        outputs.o3 + stage[at + 3u * FOLDING],
        outputs.o4 + stage[at + 4u * FOLDING],
        outputs.o5 + stage[at + 5u * FOLDING],
        outputs.o6 + stage[at + 6u * FOLDING],
        outputs.o7 + stage[at + 7u * FOLDING],
        outputs.sum + stage[at + 8u * FOLDING],
    );
}

// What the last group has left: an element of the four outputs, and their sums.
fn left_element(element: u32) -> vec4<f32> {
    return stage[(element & 7u) * FOLDING + (element >> 3u)];
}

fn left_sum() -> vec4<f32> {
    return stage[8u * FOLDING];
}
