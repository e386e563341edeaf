//! What is a row in int8? Codes and one f32 scale: the rule that every backend follows.
//!
//! ```text
//! largest = max |x| over the finite elements of the row
//! scale   = largest × (1/127),   inverse = 127 / largest
//! code    = round to nearest even (x × inverse), clamped to ±127
//! ```
//!
//! in f32, each step rounded. A row whose largest magnitude is below [`SMALLEST`] is a row of zeros: scale 1, codes 0. An
//! infinite element gets the code ±127 and NaN gets 0; neither counts for the largest. −128 is never a code. A row's
//! stored values are code × scale.
//!
//! Keys may be [calibrated](KeyCalibration) first: [`KeyStatistics`] fits a calibration to a model's keys, and
//! [`KeyCheck`] says whether they need one.

mod calibration;
mod check;
mod file;
mod statistics;

pub use calibration::KeyCalibration;
pub(crate) use calibration::calibrate;
pub use check::KeyCheck;
pub use statistics::KeyStatistics;

/// Magnitudes below this (2⁻¹¹⁸) make a row of zeros: from here on scale and inverse are normal numbers, which no device
/// flushes to zero.
pub const SMALLEST: f32 = f32::from_bits(0x0480_0000);

/// The scale of a row and, in `codes`, its elements. Both have the same length.
///
/// ```
/// let mut codes = [0; 4];
/// let scale = kvtide::quantize::row(&[-8.0, 1.0, 0.0, 4.0], &mut codes);
/// assert_eq!((scale, codes), (8.0 * (1.0 / 127.0), [-127, 16, 0, 64]));
/// ```
pub fn row(values: &[f32], codes: &mut [i8]) -> f32 {
    let finite = values.iter().map(|x| x.abs()).filter(|x| x.is_finite());
    let largest = finite.fold(0.0, f32::max);
    let (scale, inverse) = if largest < SMALLEST { (1.0, 0.0) } else { (largest * (1.0 / 127.0), 127.0 / largest) };
    codes.iter_mut().zip(values).for_each(|(code, &x)| *code = self::code(x, inverse));
    scale
}

/// The code of one element.
fn code(x: f32, inverse: f32) -> i8 {
    if x.is_nan() {
        0
    } else if x.is_infinite() {
        if x > 0.0 { 127 } else { -127 }
    } else {
        (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> (f32, Vec<i8>) {
        let mut codes = vec![99; values.len()];
        let scale = row(values, &mut codes);
        (scale, codes)
    }

    #[test]
    fn rows_of_zeros_and_of_almost_nothing_are_zeros() {
        for tiny in [0.0, -0.0, f32::from_bits(1), f32::from_bits(0x0001_0000), -1e-38, 1.5e-36] {
            assert_eq!(of(&[tiny, 0.0, -tiny]), (1.0, vec![0; 3]), "{tiny:e}");
        }
        assert_eq!(of(&[SMALLEST, 0.0]).1, [127, 0]);
        assert!(of(&[SMALLEST]).0.is_normal() && (127.0 / SMALLEST).is_normal());
    }

    #[test]
    fn constant_rows_come_back_and_minus_128_never_appears() {
        for x in [100.0f32, -100.0, -8.0, 0.1, 3e38, -3.4e38, f32::MAX, f32::MIN] {
            let (scale, codes) = of(&[x; 5]);
            assert!(codes.iter().all(|&code| code == if x > 0.0 { 127 } else { -127 }), "{x}: {codes:?}");
            assert!((f32::from(codes[0]) * scale / x - 1.0).abs() < 1e-6);
        }
        assert_eq!(of(&[-8.0, 1.0, 1.0]).1, [-127, 16, 16]);
    }

    #[test]
    fn infinities_clamp_nans_vanish_and_neither_sets_the_scale() {
        let (scale, codes) = of(&[f32::INFINITY, 2.0, f32::NEG_INFINITY, -f32::NAN, -1.0, f32::NAN]);
        assert_eq!((scale, codes), (2.0 * (1.0 / 127.0), vec![127, 127, -127, 0, -64, 0]));
        assert_eq!(of(&[f32::INFINITY, f32::NAN]), (1.0, vec![127, 0]));
    }

    #[test]
    fn ties_go_to_even_and_every_code_is_nearest() {
        // The largest is 127, so that inverse and scale are (almost) 1 and halves are ties.
        let (_, codes) = of(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 62.5, 63.5]);
        assert_eq!(codes, [127, 0, 2, 2, 0, -2, 62, 64]);
        let values: Vec<f32> = (0..999u32).map(|i| ((i * 7919) % 1999) as f32 / 17.0 - 58.0).collect();
        let (scale, codes) = of(&values);
        for (x, code) in values.iter().zip(codes) {
            assert!((f64::from(*x) - f64::from(code) * f64::from(scale)).abs() <= f64::from(scale) * 0.5001);
        }
    }
}
