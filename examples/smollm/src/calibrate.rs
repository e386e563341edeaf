//! How are a model's keys centred and scaled before they become int8? By what they are over a text.

use std::path::Path;

use anyhow::Result;
use kvtide::KeyStatistics;

use crate::args::Args;
use crate::attention::{Attention, Footprint};
use crate::generate::prefill;
use crate::model::Model;
use crate::plain::Format;

/// Runs `tokens` and writes a calibration of their keys to `file`.
pub(crate) fn calibrate(args: &Args, model: &Model, tokens: &[u32], file: &Path) -> Result<()> {
    let geometry = args.geometry(model.heads, Format::Int8)?;
    // What attention gives must not come from the pages that the calibration is for.
    let inner = args.attention_in(model.heads, tokens.len(), Format::Bf16, None)?;
    let mut collector = Collector { inner, statistics: KeyStatistics::new(&geometry)? };
    prefill(model, tokens, args.chunk.get(), &mut collector)?;
    let calibration = collector.statistics.calibration()?;
    calibration.save(file)?;
    println!("{}: keys of {} tokens, {:#018x}", file.display(), tokens.len(), calibration.checksum());
    Ok(())
}

/// Passes everything on and looks at the keys.
struct Collector {
    inner: Box<dyn Attention>,
    statistics: KeyStatistics,
}

impl Attention for Collector {
    fn attend(
        &mut self,
        layer: usize,
        position: usize,
        rows: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<Vec<f32>> {
        self.statistics.add(layer, k)?;
        self.inner.attend(layer, position, rows, q, k, v)
    }

    fn footprint(&mut self) -> Result<Footprint> {
        self.inner.footprint()
    }
}
