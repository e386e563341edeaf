//! Which bytes must an arena hold? Slabs of poisoned frames on the device, and their copy on the host.

use super::bench::{Bench, Layout};
use super::check::Check;
use super::values::{Quantized, Rng, Tensor, convert, page_poison, set_element};
use crate::backend::Backend;
use crate::backend::ops::{Append, Arena, Channels, split_frame};
use crate::backend::params::AppendRun;
use crate::record::Record;
use crate::{Geometry, KeyCalibration, Result, View};

/// How frames are numbered and handed out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placement {
    /// Slabs (fewer where the backend has fewer).
    pub(super) slabs: u32,
    /// Seed of the order in which frames are handed out; `None`: ascending.
    pub(super) shuffle: Option<u64>,
    /// The word that fills the arena at first; `None`: NaNs of the format.
    pub(super) fill: Option<u32>,
    /// Whether quantised keys are centred and scaled by numbers without a pattern.
    pub(super) calibrated: bool,
}

impl Placement {
    /// Frames shuffled over three slabs, NaN everywhere.
    pub(super) const SHUFFLED: Placement = Placement { slabs: 3, shuffle: Some(7), fill: None, calibrated: true };
    /// The same, with keys as they are.
    pub(super) const UNCALIBRATED: Placement = Placement { calibrated: false, ..Self::SHUFFLED };
    /// Ascending frames of one slab.
    pub(super) const PLAIN: Placement = Placement { slabs: 1, shuffle: None, fill: None, calibrated: true };
}

/// New tokens' K and V, on the host and on the device.
#[derive(Debug)]
pub(super) struct Tokens<B: Backend> {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) k_view: View<B::Buffer>,
    pub(super) v_view: View<B::Buffer>,
}

impl<B: Backend> Tokens<B> {
    pub(super) fn new(bench: &mut Bench<'_, B>, k: Tensor, v: Tensor, layouts: [Layout; 2]) -> Result<Self> {
        let (k_view, v_view) = (bench.tensor(&k, layouts[0])?, bench.tensor(&v, layouts[1])?);
        Ok(Tokens { k, v, k_view, v_view })
    }
}

/// Tokens `from..from + tokens` of a tensor that become tokens `at..` of the sequence with this table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) table: &'a [u32],
    pub(super) at: u32,
    pub(super) from: u32,
    pub(super) tokens: u32,
}

/// An arena and what it must hold.
#[derive(Debug)]
pub(super) struct Pages<B: Backend> {
    pub(super) record: Record,
    pub(super) slabs: Vec<B::Buffer>,
    pub(super) shift: u32,
    /// Counts non-finite elements.
    pub(super) counter: B::Buffer,
    /// What quantised keys are calibrated by, and the same on the device.
    pub(super) calibration: Option<(KeyCalibration, B::Buffer)>,
    /// The words that each slab must hold.
    pub(super) host: Vec<Vec<u32>>,
    free: Vec<u32>,
}

impl<B: Backend> Pages<B> {
    /// At least `frames` frames.
    pub(super) fn new(bench: &mut Bench<'_, B>, geometry: Geometry, frames: u32, placement: Placement) -> Result<Self> {
        let record = Record::new(geometry.validate()?);
        let count = placement.slabs.clamp(1, bench.backend.caps().max_slabs);
        let per_slab = frames.max(1).div_ceil(count);
        let shift = per_slab.next_power_of_two().trailing_zeros();
        let word = placement.fill.unwrap_or(page_poison(record.format()));
        let words = per_slab as usize * record.frame_stride() as usize / 4;
        let slab = |_| bench.filled("a slab", words, word);
        let slabs = (0..count).map(slab).collect::<Result<Vec<_>>>()?;
        // Handed out from the end.
        let mut free: Vec<u32> =
            (0..count * per_slab).map(|n| ((n / per_slab) << shift) | (n % per_slab)).rev().collect();
        if let Some(seed) = placement.shuffle {
            Rng::new(seed).shuffle(&mut free);
        }
        let counter = bench.filled("a counter", 1, 0)?;
        let calibration = calibration(bench, record.geometry(), placement.calibrated)?;
        Ok(Pages { record, slabs, shift, counter, calibration, host: vec![vec![word; words]; count as usize], free })
    }

    /// Frames of given slabs, without the host's copy and with whatever the slabs hold.
    pub(super) fn bare(
        bench: &mut Bench<'_, B>,
        geometry: Geometry,
        slabs: Vec<B::Buffer>,
        shift: u32,
    ) -> Result<Self> {
        let (record, counter) = (Record::new(geometry.validate()?), bench.filled("a counter", 1, 0)?);
        let calibration = calibration(bench, record.geometry(), true)?;
        Ok(Pages { record, slabs, shift, counter, calibration, host: Vec::new(), free: Vec::new() })
    }

    pub(super) fn arena(&self) -> Arena<'_, B::Buffer> {
        Arena { slabs: &self.slabs, slab_shift: self.shift }
    }

    /// The channels of the pages' keys.
    pub(super) fn channels(&self) -> Option<Channels<'_, B::Buffer>> {
        self.calibration.as_ref().map(|(_, buffer)| Channels { buffer, offset: CHANNELS_AT })
    }

    /// Mean and scale of a head's keys.
    pub(super) fn key_channels(&self, head: u32) -> Option<(&[f32], &[f32])> {
        self.calibration.as_ref().map(|(calibration, _)| (calibration.mean(0, head), calibration.scale(0, head)))
    }

    /// Keys are calibrated by this from now on.
    pub(super) fn calibrate(&mut self, bench: &mut Bench<'_, B>, calibration: KeyCalibration) -> Result<()> {
        let buffer = upload(bench, &calibration)?;
        self.calibration = Some((calibration, buffer));
        Ok(())
    }

    /// The codes of the K and V rows that were written, as the device has them.
    pub(super) fn codes(&self, bench: &mut Bench<'_, B>) -> Result<Vec<i8>> {
        let (record, poison) = (&self.record, page_poison(self.record.format()));
        let mut codes = Vec::new();
        for (slab, host) in self.slabs.iter().zip(&self.host) {
            let words = bench.read(slab, host.len())?;
            let stride = record.frame_stride() as usize / 4;
            for (frame, mirror) in words.chunks(stride).zip(host.chunks(stride)) {
                let written = frame.iter().zip(mirror).take(record.scale_base() as usize / 4);
                codes.extend(written.filter(|(_, mirror)| **mirror != poison).flat_map(|(w, _)| w.to_le_bytes()));
            }
        }
        Ok(codes.into_iter().map(|byte| byte as i8).collect())
    }

    /// Frames that nobody has.
    pub(super) fn take(&mut self, frames: usize) -> Vec<u32> {
        self.free.split_off(self.free.len() - frames)
    }

    /// Frames for a sequence of `tokens` tokens.
    pub(super) fn table(&mut self, tokens: u32) -> Vec<u32> {
        let pages = self.record.geometry().pages_for(tokens.into());
        self.take(pages as usize)
    }

    /// Where the words of a frame lie: slab and first word.
    pub(super) fn place(&self, frame: u32) -> (usize, usize) {
        let (slab, index) = split_frame(frame, self.shift);
        (slab as usize, index as usize * self.record.frame_stride() as usize / 4)
    }

    /// Writes tokens through the backend, and into the host's copy.
    pub(super) fn append(&mut self, bench: &mut Bench<'_, B>, tokens: &Tokens<B>, pieces: &[Piece<'_>]) -> Result<()> {
        let runs = self.runs(tokens, pieces);
        bench.backend.append(&mut bench.stream, &self.args(tokens, &runs))?;
        if !self.host.is_empty() {
            pieces.iter().for_each(|piece| self.mirror(tokens, piece));
        }
        Ok(())
    }

    /// The arguments of an append of these runs.
    pub(super) fn args<'a>(&'a self, tokens: &'a Tokens<B>, runs: &'a [AppendRun]) -> Append<'a, B::Buffer> {
        let (k, v, channels, non_finite) = (&tokens.k_view, &tokens.v_view, self.channels(), &self.counter);
        let (record, arena, onto) = (self.record, self.arena(), None);
        Append { record, arena, k, v, channels, runs, onto, non_finite, write: true }
    }

    /// One run for each page that a piece touches.
    pub(super) fn runs(&self, tokens: &Tokens<B>, pieces: &[Piece<'_>]) -> Vec<AppendRun> {
        let page = self.record.geometry().page_tokens();
        let offset = |view: &View<B::Buffer>, row: u32| (u64::from(row) * view.strides[0]) as u32;
        let mut runs = Vec::new();
        for piece in pieces {
            let mut done = 0;
            while done < piece.tokens {
                let (token, from) = (piece.at + done, piece.from + done);
                let (frame, slot) = (piece.table[(token / page) as usize], token % page);
                let tokens_here = (page - slot).min(piece.tokens - done);
                let (k_offset, v_offset) = (offset(&tokens.k_view, from), offset(&tokens.v_view, from));
                runs.push(AppendRun {
                    k_offset,
                    v_offset,
                    frame,
                    slot,
                    tokens: tokens_here,
                    page: 0,
                    reserved: [0; 2],
                });
                done += tokens_here;
            }
        }
        runs
    }

    fn mirror(&mut self, tokens: &Tokens<B>, piece: &Piece<'_>) {
        let (record, calibration) = (self.record, self.calibration.take());
        let page = record.geometry().page_tokens();
        for token in 0..piece.tokens {
            let slot = (piece.at + token) % page;
            let (slab, base) = self.place(piece.table[((piece.at + token) / page) as usize]);
            let words = &mut self.host[slab][base..];
            for head in 0..record.geometry().kv_heads() {
                let channels = calibration.as_ref().map(|(all, _)| (all.mean(0, head), all.scale(0, head)));
                let places = [
                    (&tokens.k, record.key(head, slot), record.key_scale(head, slot), channels),
                    (&tokens.v, record.value(head, slot), record.value_scale(head, slot), None),
                ];
                for (tensor, at, scale_at, channels) in places {
                    let row = (piece.from + token) as usize * tensor.shape[1] + head as usize;
                    let bits = &tensor.bits[row * tensor.shape[2]..][..tensor.shape[2]];
                    if let Some(to) = record.format().dtype() {
                        let first = (at / to.bytes()) as usize;
                        for (d, &bits) in bits.iter().enumerate() {
                            set_element(words, first + d, convert(bits, tensor.dtype, to), to);
                        }
                    } else {
                        let row = Quantized::new(bits, tensor.dtype, channels);
                        let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
                        bytes[at as usize..].iter_mut().zip(&row.codes).for_each(|(byte, &code)| *byte = code as u8);
                        words[scale_at as usize / 4] = row.scale.to_bits();
                    }
                }
            }
        }
        self.calibration = calibration;
    }

    /// Compares every byte of every slab with the host's copy, and the counter with `non_finite`.
    pub(super) fn compare(&self, bench: &mut Bench<'_, B>, check: &mut Check, non_finite: u32) -> Result<()> {
        for (slab, host) in self.slabs.iter().zip(&self.host) {
            check.bits("page bytes", &bench.read(slab, host.len())?, host);
        }
        check.bits("non-finite count", &bench.read(&self.counter, 1)?, &[non_finite]);
        Ok(())
    }
}

/// Bytes before the channels.
const CHANNELS_AT: u64 = 256;

/// What the keys of quantised pages are calibrated by: behind poison on the device.
fn calibration<B: Backend>(
    bench: &mut Bench<'_, B>,
    geometry: &Geometry,
    calibrated: bool,
) -> Result<Option<(KeyCalibration, B::Buffer)>> {
    if !geometry.page_format().is_quantized() {
        return Ok(None);
    }
    // The conformance suite works on one layer.
    let channels = (geometry.kv_heads() * geometry.k_dim()) as usize;
    let mut rng = Rng::new(71);
    let random = |rng: &mut Rng| (0..channels).map(|_| rng.normal()).collect::<Vec<f32>>();
    let calibration = if calibrated {
        let scale = random(&mut rng).into_iter().map(|x| (0.5 * x).exp()).collect();
        KeyCalibration::new(geometry, random(&mut rng), scale)?
    } else {
        KeyCalibration::identity(geometry)?
    };
    let buffer = upload(bench, &calibration)?;
    Ok(Some((calibration, buffer)))
}

fn upload<B: Backend>(bench: &mut Bench<'_, B>, calibration: &KeyCalibration) -> Result<B::Buffer> {
    let mut words = vec![f32::NAN; CHANNELS_AT as usize / 4];
    words.extend(calibration.device_words(0));
    bench.words("a key calibration", bytemuck::cast_slice(&words))
}
