// What do states fold into? The first that saw something is taken as it is, the later ones are added to it in order, so
// that a fold of folds has the bits of one fold. `params` and `states` are the kernel's own.

// Four elements, the maximum, the sum and what all scores lack; nothing was seen where the sum is 0.
struct Total {
    o: vec4<f32>,
    m: f32,
    l: f32,
    c: f32,
}

// Elements `element` and on of `count` states from `first` on.
fn fold_states(first: u32, count: u32, head: u32, element: u32) -> Total {
    var m = 0.0;
    var l = 0.0;
    var c = 0.0;
    var o = vec4(0.0);
    for (var i = 0u; i < count; i++) {
        let at = ((first + i) * params.q_heads + head) * params.state_words;
        let state_m = states[at + params.v_dim];
        let state_l = states[at + params.v_dim + 1u];
        if (state_l == 0.0) {
            continue;
        }
        let state_o = vec4(
            states[at + element],
            states[at + element + 1u],
            states[at + element + 2u],
            states[at + element + 3u],
        );
        if (l == 0.0) {
            m = state_m;
            l = state_l;
            c = states[at + params.v_dim + 2u];
            o = state_o;
        } else {
            let top = max(m, state_m);
            let keep = weight(m - top);
            let take = weight(state_m - top);
            l = fma(l, keep, state_l * take);
            o = fma(o, vec4(keep), state_o * take);
            m = top;
        }
    }
    return Total(o, m, l, c);
}
