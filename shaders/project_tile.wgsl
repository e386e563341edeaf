// How does a workgroup that has written keys project a tile of them: eight tokens of one run and KV head? As project.wgsl does,
// and to the same bits: a sum takes the elements of a key one after the other. Their keys lie in workgroup memory, and each
// thread sums two columns of the basis for four tokens, which are the lanes of its vec4s.

const TILE = 8u;

// Element d of tokens 0 to 3 of the tile, then of tokens 4 to 7.
var<workgroup> keys: array<vec4<f32>, 512>;

// Elements 8 × unit .. 8 × unit + 8 of a token of the run; zeros past its end.
fn stage(run: ProjectRun, head: u32, token: u32, unit: u32) -> Eight {
    if (token >= run.tokens) {
        return Eight(vec4(0.0), vec4(0.0));
    }
    return load_key(run, head, token, unit);
}

// Stages part i of the tile from token `first` on, of k_dim / 4 parts: eight elements of four tokens.
fn stage_part(run: ProjectRun, head: u32, first: u32, i: u32) {
    let unit = i >> 1u;
    let half = i & 1u;
    let token = first + 4u * half;
    let t0 = stage(run, head, token, unit);
    let t1 = stage(run, head, token + 1u, unit);
    let t2 = stage(run, head, token + 2u, unit);
    let t3 = stage(run, head, token + 3u, unit);
    let at = 16u * unit + half;
    keys[at] = vec4(t0.a.x, t1.a.x, t2.a.x, t3.a.x);
    keys[at + 2u] = vec4(t0.a.y, t1.a.y, t2.a.y, t3.a.y);
    keys[at + 4u] = vec4(t0.a.z, t1.a.z, t2.a.z, t3.a.z);
    keys[at + 6u] = vec4(t0.a.w, t1.a.w, t2.a.w, t3.a.w);
    keys[at + 8u] = vec4(t0.b.x, t1.b.x, t2.b.x, t3.b.x);
    keys[at + 10u] = vec4(t0.b.y, t1.b.y, t2.b.y, t3.b.y);
    keys[at + 12u] = vec4(t0.b.z, t1.b.z, t2.b.z, t3.b.z);
    keys[at + 14u] = vec4(t0.b.w, t1.b.w, t2.b.w, t3.b.w);
}

fn store(run: ProjectRun, head: u32, token: u32, pair: u32, low: f32, high: f32) {
    if (token >= run.tokens) {
        return;
    }
    let p = params.projections;
    let record = run.page * p.record_words;
    let bits = f32_to_bf16(vec4(bitcast<u32>(low), bitcast<u32>(high), 0u, 0u));
    projected[record + projected_word(p, head, run.slot + token) + pair] = pack(bits.x, bits.y);
    if (pair == 0u) {
        projected[record + norm_word(p, head, run.slot + token)] = 0u;
    }
}

// Projects part i of the tile from token `first` on, of `rank` parts: two columns of four tokens.
fn project_part(run: ProjectRun, head: u32, first: u32, i: u32) {
    let pairs = params.projections.rank >> 1u;
    let pair = i % pairs;
    let half = i / pairs;
    let token = first + 4u * half;
    var low = vec4(0.0);
    var high = vec4(0.0);
    if (token < run.tokens) {
        let column = params.basis_base + head * params.basis_stride + pair;
        for (var d = 0u; d < params.record.k_dim; d++) {
            let p = unpack_pair(basis[column + d * pairs]);
            let key = keys[2u * d + half];
            low = fma(key, vec4(p.x), low);
            high = fma(key, vec4(p.y), high);
        }
    }
    store(run, head, token, pair, low.x, high.x);
    store(run, head, token + 1u, pair, low.y, high.y);
    store(run, head, token + 2u, pair, low.z, high.z);
    store(run, head, token + 3u, pair, low.w, high.w);
}
