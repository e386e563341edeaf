// How do weighted values become the outputs of a split? A thread adds up eight elements over its tokens, for four queries.

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
