//! The float64 oracle: softmax attention as the textbook writes it, over values as they are stored.

use std::ops::Range;

/// K and V of one sequence and layer, dense and already rounded to what the pages store.
#[derive(Debug, Clone, Default)]
pub struct Context {
    /// Keys `[token, kv_head, k_dim]`.
    pub k: Vec<f32>,
    /// Values `[token, kv_head, v_dim]`.
    pub v: Vec<f32>,
}

/// The heads of an attention.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
}

impl From<&crate::Geometry> for Heads {
    fn from(g: &crate::Geometry) -> Self {
        let [q_heads, kv_heads, k_dim, v_dim] = [g.q_heads(), g.kv_heads(), g.k_dim(), g.v_dim()].map(|n| n as usize);
        Heads { q_heads, kv_heads, k_dim, v_dim }
    }
}

/// Output `[q_head, v_dim]` and log-sum-exp `[q_head]` of one query row `[q_head, k_dim]` over the tokens `visible`.
///
/// Zeros and −∞ when `visible` is empty.
pub fn attend(q: &[f32], context: &Context, heads: Heads, visible: Range<usize>, scale: f32) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; heads.q_heads * heads.v_dim];
    let mut lse = vec![f64::NEG_INFINITY; heads.q_heads];
    if visible.is_empty() {
        return (out, lse);
    }
    let group = heads.q_heads / heads.kv_heads;
    for head in 0..heads.q_heads {
        let query = &q[head * heads.k_dim..][..heads.k_dim];
        let row = |token: usize| token * heads.kv_heads + head / group;
        let score = |token: usize| {
            let key = &context.k[row(token) * heads.k_dim..][..heads.k_dim];
            let dot: f64 = query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            dot * f64::from(scale)
        };
        let scores: Vec<f64> = visible.clone().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        lse[head] = top + sum.ln();
        let out = &mut out[head * heads.v_dim..][..heads.v_dim];
        for (token, s) in visible.clone().zip(&scores) {
            let p = (s - top).exp() / sum;
            let value = &context.v[row(token) * heads.v_dim..][..heads.v_dim];
            out.iter_mut().zip(value).for_each(|(o, v)| *o += p * f64::from(*v));
        }
    }
    (out, lse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_keys_give_the_mean_of_the_values_and_the_log_of_their_number() {
        let heads = Heads { q_heads: 2, kv_heads: 1, k_dim: 1, v_dim: 1 };
        let context = Context { k: vec![0.0; 5], v: vec![0.0, 1.0, 2.0, 3.0, 4.0] };
        let (out, lse) = attend(&[7.0, -7.0], &context, heads, 1..5, 1.0);
        assert_eq!(out, [2.5, 2.5]);
        assert!(lse.iter().all(|l| (l - 4f64.ln()).abs() < 1e-12));
        assert_eq!(attend(&[7.0, 1.0], &context, heads, 2..2, 1.0).1, [f64::NEG_INFINITY; 2]);
    }
}
