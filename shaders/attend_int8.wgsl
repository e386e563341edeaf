// How does attend read int8 pages? Codes as numbers, which nothing multiplies in the inner loops: the queries take the
// channels' scales, the scores those of the key rows, and the softmax's weights those of the value rows. What the means add
// to every score of a query is a constant beside its state.
//
// Parts of `stage`: the queries, whose place the weights take; the maxima; the products of the queries with the means; and
// 16 partial sums of those.
const PRODUCTS = 272u;
const PARTS = 528u;

fn stage_query(lanes: Lanes, kv_head: u32, element: u32) {
    let record = params.record;
    let query = load_query(lanes, element);
    let four = element & ~3u;
    stage[element] = query * channel_four(record, kv_head, SCALE, four)[element & 3u];
    stage[PRODUCTS + element] = query * channel_four(record, kv_head, MEAN, four)[element & 3u];
}

// The products of the four queries with the keys of slots `slot` and `slot` + 1.
fn key_products(place: Place, kv_head: u32, slot: u32) -> Dots {
    let record = params.record;
    let key_a = half_of(place, key_word(record, kv_head, slot));
    let key_b = key_a + (record.k_row_words >> 1u);
    let units = record.k_dim >> 3u;
    var sums = Dots(vec4(0.0), vec4(0.0));
    if ((record.k_row_words & 3u) == 0u) {
        // Whole quads: two units a load.
        for (var unit = 0u; unit < units; unit += 2u) {
            let quad_a = load_quad(place.slab, (key_a + unit) >> 1u);
            let quad_b = load_quad(place.slab, (key_b + unit) >> 1u);
            sums = add_unit(sums, quad_a.xy, quad_b.xy, unit);
            sums = add_unit(sums, quad_a.zw, quad_b.zw, unit + 1u);
        }
    } else {
        for (var unit = 0u; unit < units; unit++) {
            sums = add_unit(sums, load_half(place.slab, key_a + unit), load_half(place.slab, key_b + unit), unit);
        }
    }
    let words = load_half(place.slab, half_of(place, key_scale_word(record, kv_head, slot)));
    let scales = bitcast<vec2<f32>>(words);
    return Dots(sums.a * scales.x, sums.b * scales.y);
}

fn add_unit(sums: Dots, words_a: vec2<u32>, words_b: vec2<u32>, unit: u32) -> Dots {
    let dots = dot_eight(eight_codes(words_a), eight_codes(words_b), 8u * unit);
    return Dots(sums.a + dots.a, sums.b + dots.b);
}

fn load_value(place: Place, kv_head: u32, slot: u32, unit: u32) -> Eight {
    return eight_codes(load_half(place.slab, half_of(place, value_word(params.record, kv_head, slot)) + unit));
}

// The weights of values are the softmax's times the scales of their rows.
const WEIGHTS_ARE_STAGED = true;

// The scales of the values of slots `slot`, which is even, and `slot` + 1.
fn load_value_scales(place: Place, kv_head: u32, slot: u32) -> vec2<f32> {
    return bitcast<vec2<f32>>(load_half(place.slab, half_of(place, value_scale_word(params.record, kv_head, slot))));
}

// A token that is not seen has no weight, and perhaps no scale that is a number.
fn stage_weights(token: u32, p_a: vec4<f32>, p_b: vec4<f32>, scales: vec2<f32>) {
    stage[token] = select(vec4(0.0), p_a * scales.x, p_a > vec4(0.0));
    stage[token + 1u] = select(vec4(0.0), p_b * scales.y, p_b > vec4(0.0));
}

fn value_weight(token: u32) -> vec4<f32> {
    return stage[token];
}

// Query · mean × scale × log2 e, in an order that depends on the number of elements alone: first 16 threads sum every
// 16th product each, then their results are added.
fn stage_constant(thread: u32) {
    if (thread < 16u) {
        var sum = vec4(0.0);
        for (var i = thread; i < params.record.k_dim; i += 16u) {
            sum += stage[PRODUCTS + i];
        }
        stage[PARTS + thread] = sum;
    }
}

fn sum_constant() -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < 16u; i++) {
        sum += stage[PARTS + i];
    }
    return sum * params.scale_log2;
}
