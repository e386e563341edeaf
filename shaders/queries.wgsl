// What are the queries of a score on the basis? A workgroup takes one query vector; each thread sums two columns over a
// part of the query's elements, and the parts are then added in order.

struct QueryParams {
    q: ViewParams,
    q_dtype: u32,
    q_heads: u32,
    group: u32,
    k_dim: u32,
    rank: u32,
    basis_base: u32,
    basis_stride: u32,
    rows: u32,
}

@group(0) @binding(0) var<uniform> params: QueryParams;
@group(1) @binding(0) var<storage, read> queries: array<u32>;
@group(1) @binding(1) var<storage, read> basis: array<u32>;
@group(1) @binding(2) var<storage, read_write> projected: array<f32>;

const THREADS = 64u;

var<workgroup> query: array<f32, 256>;
var<workgroup> sums: array<vec2<f32>, 64>;

@compute @workgroup_size(64)
fn project_queries(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let vector = workgroup.y * FOLD + workgroup.x;
    if (vector >= params.rows * params.q_heads) {
        return;
    }
    let head = vector % params.q_heads;
    for (var d = thread; d < params.k_dim; d += THREADS) {
        let index = element_at(params.q, vector / params.q_heads, head, d);
        let bits = bits_in(queries[word_of(index, params.q_dtype)], index, params.q_dtype);
        query[d] = bitcast<vec4<f32>>(widen(vec4(bits, 0u, 0u, 0u), params.q_dtype)).x;
    }
    workgroupBarrier();
    let pairs = params.rank >> 1u;
    let parts = THREADS / pairs;
    let pair = thread % pairs;
    let part = thread / pairs;
    var sum = vec2(0.0);
    if (part < parts) {
        let column = params.basis_base + head / params.group * params.basis_stride + pair;
        for (var d = part; d < params.k_dim; d += parts) {
            sum = fma(vec2(query[d]), unpack_pair(basis[column + d * pairs]), sum);
        }
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (part > 0u) {
        return;
    }
    for (var i = 1u; i < parts; i++) {
        sum += sums[i * pairs + pair];
    }
    let small = f32_to_bf16(bitcast<vec4<u32>>(vec4(sum, 0.0, 0.0)));
    projected[vector * params.rank + 2u * pair] = bitcast<f32>(small.x << 16u);
    projected[vector * params.rank + 2u * pair + 1u] = bitcast<f32>(small.y << 16u);
}
