// What do the words of a range add up to, modulo 2^32? A kernel that reads and does nothing else: what it takes is what
// reading costs. A thread takes four units of sixteen bytes at once.

struct SumParams {
    units: u32,
    reserved_1: u32,
    reserved_2: u32,
    reserved_3: u32,
}

@group(0) @binding(0) var<uniform> params: SumParams;
@group(1) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(1) @binding(1) var<storage, read_write> total: atomic<u32>;

const THREADS = 256u;
const LOADS = 4u;

var<workgroup> sums: array<u32, 256>;

// A unit of the range; zeros past its end.
fn unit(at: u32) -> vec4<u32> {
    if (at >= params.units) {
        return vec4(0u);
    }
    return source[at];
}

@compute @workgroup_size(256)
fn sum(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    var mine = vec4(0u);
    let stride = THREADS * LOADS;
    for (var block = group.x; block * stride < params.units; block += groups.x) {
        let at = block * stride + thread;
        let a = unit(at);
        let b = unit(at + THREADS);
        let c = unit(at + 2u * THREADS);
        let d = unit(at + 3u * THREADS);
        mine += a + b + c + d;
    }
    sums[thread] = mine.x + mine.y + mine.z + mine.w;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half >>= 1u) {
        if (thread < half) {
            sums[thread] += sums[thread + half];
        }
        workgroupBarrier();
    }
    if (thread == 0u) {
        atomicAdd(&total, sums[0]);
    }
}
