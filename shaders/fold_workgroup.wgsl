// How do threads that have the same elements of the outputs fold them? Through `stage` alone: the upper half of the threads
// hands over to the lower half, and that to who has the element of the state; eight vectors for each of FOLDING.

const FOLDING = 64u;
// Vectors from an element to the next: those that are read together are in different banks.
const APART = 65u;
const FOLDS = 8u * APART;

fn fold_outputs(outputs: Outputs, thread: u32) {
    if (thread >= FOLDING) {
        leave(outputs, thread - FOLDING);
    }
    workgroupBarrier();
    if (thread < FOLDING) {
        leave(add_left(outputs, thread), thread);
    }
    workgroupBarrier();
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
