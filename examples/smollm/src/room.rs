//! How much of the KV cache may stay on the device, and where does the rest go? The options, and the store they ask for.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, process};

use anyhow::{Context, Error, Result, bail, ensure};
use clap::{Args, ValueEnum};
use kvtide::record::Record;
use kvtide::swap::HighSpeedSwap;
use kvtide::tiers::{FileTier, HostTier, Tier};
use kvtide::{Device, Geometry, KeyCalibration};

use crate::store::Store;

/// Device memory for pages, and the tier behind it.
#[derive(Args)]
pub(crate) struct Room {
    /// Device memory for pages: a fraction of what all of them take, as 1/4, or bytes, as 64MiB [default: all]
    #[arg(long, value_name = "SHARE")]
    kv_budget: Option<Budget>,
    /// Where the pages go that find no place on the device
    #[arg(long, value_enum, default_value = "host", requires = "kv_budget")]
    tier: Kind,
    /// The file of the tiers `file` and `cascade` [default: a temporary one]
    #[arg(long, value_name = "FILE", requires = "kv_budget")]
    tier_path: Option<PathBuf>,
    /// Bytes of the tier, as 2GiB [default: what all pages take]
    #[arg(long, value_name = "BYTES", value_parser = bytes, requires = "kv_budget")]
    tier_bytes: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Budget {
    Fraction(u64, u64),
    Bytes(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Host memory
    Host,
    /// A file, checked when it is read
    File,
    /// Host memory for half of the pages, over a file for all of them
    Cascade,
}

impl Room {
    /// A store for `tokens` tokens in every layer.
    pub(crate) fn store(
        &self,
        device: Device,
        geometry: Geometry,
        tokens: usize,
        calibration: Option<KeyCalibration>,
    ) -> Result<Store> {
        let Some(budget) = self.kv_budget else { return Store::resident(device, geometry, calibration) };
        let record = Record::new(geometry.validate()?);
        let pages = geometry.pages_for(tokens as u64) * u64::from(geometry.layers());
        let budget = match budget {
            Budget::Fraction(part, whole) => pages * record.frame_stride() * part / whole,
            Budget::Bytes(bytes) => bytes,
        };
        let bytes = self.tier_bytes.unwrap_or(pages * record.file_stride());
        let (path, file) = match (&self.tier_path, self.tier) {
            (_, Kind::Host) => (PathBuf::new(), None),
            (Some(path), _) => (path.clone(), None),
            (None, _) => {
                let file = Temporary::new();
                (file.0.clone(), Some(file))
            }
        };
        let tier: Box<dyn Tier<Device>> = match self.tier {
            Kind::Host => Box::new(HostTier::new(bytes)),
            Kind::File => Box::new(FileTier::create(path, bytes)),
            Kind::Cascade => Box::new(FileTier::create(path, bytes).host_cache(bytes / 2)),
        };
        let mut builder = HighSpeedSwap::builder(device, geometry).device_budget(budget).boxed_tier(tier);
        if let Some(calibration) = calibration {
            builder = builder.key_calibration(calibration);
        }
        let store = builder.build().with_context(|| format!("{pages} pages over a device budget of {budget} bytes"))?;
        Ok(Store::swapped(store, pages, file))
    }

    /// Whether pages have a tier to go to.
    pub(crate) fn is_bounded(&self) -> bool {
        self.kv_budget.is_some()
    }
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((part, whole)) = text.split_once('/') else { return Ok(Self::Bytes(bytes(text)?)) };
        let (part, whole) = (part.parse()?, whole.parse()?);
        ensure!(0 < part && part <= whole && whole <= 1 << 20, "a fraction is more than 0 and at most 1, as 1/4");
        Ok(Self::Fraction(part, whole))
    }
}

/// A number of bytes, with `KiB`, `MiB` or `GiB` behind it if you like.
fn bytes(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => bail!("`{other}` is not B, KiB, MiB or GiB"),
    };
    digits.parse::<u64>()?.checked_mul(unit).context("that is more than any machine has")
}

/// The path of a file that is removed when this is dropped.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(env::temp_dir().join(format!("kvtide-smollm-{}-{number}", process::id())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is not there when the store was refused before it made it.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_fractions_or_bytes() {
        let budget = |text: &str| text.parse::<Budget>().ok();
        assert_eq!(budget("1/4"), Some(Budget::Fraction(1, 4)));
        assert_eq!(budget("64MiB"), Some(Budget::Bytes(64 << 20)));
        assert_eq!(budget("4096"), Some(Budget::Bytes(4096)));
        for wrong in ["", "5/4", "0/4", "1/0", "1/x", "64MB", "MiB", "-1", "99999999999GiB"] {
            assert_eq!(budget(wrong), None, "{wrong}");
        }
    }
}
