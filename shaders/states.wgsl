// What do states say of four elements, and what two of them together? `params` and `states`, quads of words, are the
// kernel's own.

// Four elements, the maximum, the sum and what all scores lack; nothing was seen where the sum is 0.
struct Total {
    o: vec4<f32>,
    m: f32,
    l: f32,
    c: f32,
}

fn nothing() -> Total {
    return Total(vec4(0.0), 0.0, 0.0, 0.0);
}

// The first quad of a state and head; a quad behind its elements is the last.
fn state_quad(state: u32, head: u32) -> u32 {
    return ((state * params.q_heads + head) * params.state_words) >> 2u;
}

// Elements `element` and on of a state and head.
fn load_state(state: u32, head: u32, element: u32) -> Total {
    let first = state_quad(state, head);
    let tail = states[first + (params.v_dim >> 2u)];
    return Total(states[first + (element >> 2u)], tail.x, tail.y, tail.z);
}

fn plus(total: Total, state: Total) -> Total {
    let step = step_to(vec4(total.m), vec4(total.l), vec4(state.m), vec4(state.l));
    let l = add(step, vec4(total.l), vec4(state.l)).x;
    return Total(add(step, total.o, state.o), step.m.x, l, select(total.c, state.c, step.first.x));
}
