//! How a [`HighSpeedSwap`] is put together and checked.

use super::marks::Marks;
use super::policy::{EvictionPolicy, Lru, PredictedScore, StableSubset};
use super::predict::{Predictor, check_policy};
use super::stats::Meter;
use super::{HighSpeedSwap, Lanes, PolicyChoice, SwapConfig};
use crate::attention::SPLIT;
use crate::backend::Backend;
use crate::predictor::Basis;
use crate::record::Record;
use crate::store::PagedStore;
use crate::tiers::Tier;
use crate::{Error, Geometry, KeyCalibration, Result};
use std::collections::{HashMap, VecDeque};

/// What a [`HighSpeedSwap`] is made of. See [`HighSpeedSwap::builder`].
#[derive(Debug)]
pub struct SwapBuilder<B: Backend> {
    backend: B,
    stream: Option<B::Stream>,
    geometry: Geometry,
    config: SwapConfig,
    tier: Option<Box<dyn Tier<B>>>,
    policy: Option<Box<dyn EvictionPolicy>>,
    basis: Option<Basis>,
    calibration: Option<KeyCalibration>,
}

impl<B: Backend> SwapBuilder<B> {
    pub(super) fn new(backend: B, geometry: Geometry) -> Self {
        SwapBuilder {
            backend,
            stream: None,
            geometry,
            config: SwapConfig::default(),
            tier: None,
            policy: None,
            basis: None,
            calibration: None,
        }
    }

    /// Bytes of frames on the device at most.
    #[must_use]
    pub fn device_budget(mut self, bytes: u64) -> Self {
        self.config.device_budget = bytes;
        self
    }

    /// Everything that can be configured, the device budget included.
    #[must_use]
    pub fn config(mut self, config: SwapConfig) -> Self {
        self.config = config;
        self
    }

    /// Where pages go that leave the device.
    #[must_use]
    pub fn tier(self, tier: impl Tier<B> + 'static) -> Self {
        self.boxed_tier(Box::new(tier))
    }

    /// The same, for a tier that was chosen at run time.
    #[must_use]
    pub fn boxed_tier(mut self, tier: Box<dyn Tier<B>>) -> Self {
        self.tier = Some(tier);
        self
    }

    /// A policy of the caller's instead of a built-in one.
    #[must_use]
    pub fn policy(mut self, policy: impl EvictionPolicy + 'static) -> Self {
        self.policy = Some(Box::new(policy));
        self
    }

    /// Projects keys on this basis as they are appended, so that pages can be scored.
    #[must_use]
    pub fn predictor(mut self, basis: Basis) -> Self {
        self.basis = Some(basis);
        self
    }

    /// Centres and scales keys by this calibration before they are quantised. A file that was closed has its own, which is
    /// taken over where none is given here; another one is refused.
    #[must_use]
    pub fn key_calibration(mut self, calibration: KeyCalibration) -> Self {
        self.calibration = Some(calibration);
        self
    }

    /// A stream of the caller's for appends and attention.
    #[must_use]
    pub fn on_stream(mut self, stream: B::Stream) -> Self {
        self.stream = Some(stream);
        self
    }

    /// Checks everything and builds the cache. Frames are allocated when pages come.
    ///
    /// # Errors
    /// A geometry or configuration that is not valid, with the field; a budget below two pages or one split of 256 tokens
    /// ([`Error::Config`]) or more than the device can address ([`Error::Limit`]); a missing tier; what the tier refuses; a
    /// key calibration of another geometry, or where pages are not quantised, or other than the tier's ([`Error::WrongFile`]).
    pub fn build(self) -> Result<HighSpeedSwap<B>> {
        let record = Record::new(self.geometry.validate()?);
        self.config.validate()?;
        let frames = self.config.device_budget / record.frame_stride();
        // A split and the page that an append begins beside it.
        let least = u64::from((SPLIT / record.geometry().page_tokens()).max(1)) + 1;
        if frames < least {
            let value = self.config.device_budget.to_string();
            let rule = "it must hold the pages of one split of 256 tokens and one page more";
            return Err(Error::Config { field: "device_budget", value, rule });
        }
        let no_tier = || Error::Config { field: "tier", value: "none".into(), rule: "a tier must be given" };
        let mut tier = self.tier.ok_or_else(no_tier)?;
        let stream = match self.stream {
            Some(stream) => stream,
            None => self.backend.stream()?,
        };
        let overlap = self.backend.caps().overlap;
        let lane = || if overlap { self.backend.stream().map(Some) } else { Ok(None) };
        let lanes = Lanes { fetch: lane()?, spill: lane()?, fetched: None, slots_freed: false };
        let backend = self.backend.clone();
        let config = crate::StoreConfig { page_limit: Some(frames), ..self.config.store() };
        let mut store = PagedStore::on_stream(self.backend, stream, self.geometry, config)?;
        if let Some(calibration) = self.calibration {
            store.calibrate_keys(calibration)?;
        }
        let policy = self.policy.unwrap_or_else(|| match self.config.policy {
            PolicyChoice::StableSubset => Box::new(StableSubset),
            PolicyChoice::Lru => Box::new(Lru),
            PolicyChoice::PredictedScore => Box::new(PredictedScore),
        });
        check_policy(&self.config, self.basis.is_some(), policy.wants_scores())?;
        // From here on a file that was closed is open: whatever fails closes it again as it was.
        tier.attach(&backend, record)?;
        let index = tier.restore();
        store.pool.swapped(frames, frames.saturating_add(tier.capacity()));
        let predictor = self.basis.map(|basis| Predictor::new(&mut store.pool, record.geometry(), basis)).transpose();
        let predictor = match (predictor, &index) {
            (Err(error), Some(index)) => {
                tier.close(&backend, index)?;
                return Err(error);
            }
            (predictor, _) => predictor?,
        };
        let mut swap = HighSpeedSwap {
            store,
            config: self.config,
            tier,
            policy,
            lanes,
            marks: Marks::new(overlap),
            flights: VecDeque::new(),
            failed: HashMap::new(),
            departures: VecDeque::new(),
            queue: VecDeque::new(),
            generation: 0,
            step: 0,
            last_layer: None,
            meter: Meter::default(),
            predictor,
            fault: None,
            restored: Vec::new(),
        };
        if let Some(index) = index
            && let Err(error) = swap.restore(&index)
        {
            swap.tier.close(&backend, &index)?;
            return Err(error);
        }
        Ok(swap)
    }
}
