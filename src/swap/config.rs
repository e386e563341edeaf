//! What a [`HighSpeedSwap`](super::HighSpeedSwap) may be told. Every field is read; none is a hint.

use crate::{Error, NonFinite, Result, StoreConfig};
use serde::{Deserialize, Serialize};

/// What to do when a full page finds no room in the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenFull {
    /// Keep the page on the device and go on; an append fails with [`Error::TierFull`] only when the device is full too.
    #[default]
    Hold,
    /// An append that completes more pages than the tier has room for fails with [`Error::TierFull`] and changes nothing.
    Refuse,
}

/// When full pages are written to the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteOut {
    /// Once fewer than a quarter of the frames are free or clean: a cache that fits the device costs no transfer.
    #[default]
    Pressure,
    /// As soon as they are full: the device never waits for a write when it needs a frame.
    Eager,
}

/// Which built-in policy ranks the pages that may give up their frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyChoice {
    /// [`StableSubset`](super::StableSubset).
    #[default]
    StableSubset,
    /// [`Lru`](super::Lru).
    Lru,
    /// [`PredictedScore`](super::PredictedScore); needs a predictor.
    PredictedScore,
}

/// How a [`HighSpeedSwap`](super::HighSpeedSwap) uses its device budget and its tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SwapConfig {
    /// Bytes of frames on the device at most.
    pub device_budget: u64,
    /// Pages that travel together when attention streams (rounded up to whole splits of 256 tokens).
    pub tile_pages: u32,
    /// Tiles under way while one is attended; 0 reads each tile when it is wanted. `None`: what the tier
    /// [asks for](crate::tiers::Tier::tiles_ahead).
    pub tiles_ahead: Option<u32>,
    /// Whether the first tiles of the next layer are fetched while this layer attends.
    pub layer_ahead: bool,
    /// When full pages are written to the tier.
    pub write_out: WriteOut,
    /// What to do when the tier is full.
    pub when_full: WhenFull,
    /// Who gives up frames first.
    pub policy: PolicyChoice,
    /// Bytes of attention states at most (one query row may always take what it needs).
    pub state_bytes: u64,
    /// Whether appends with infinite or NaN elements are refused.
    pub refuse_non_finite: bool,
}

impl Default for SwapConfig {
    fn default() -> Self {
        SwapConfig {
            device_budget: 1 << 30,
            tile_pages: 256,
            tiles_ahead: None,
            layer_ahead: true,
            write_out: WriteOut::Pressure,
            when_full: WhenFull::Hold,
            policy: PolicyChoice::StableSubset,
            state_bytes: StoreConfig::default().state_bytes,
            refuse_non_finite: false,
        }
    }
}

impl SwapConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the first field that is wrong, its value and the rule.
    pub fn validate(&self) -> Result<()> {
        let field = |ok: bool, field, value: u64, rule| {
            if ok { Ok(()) } else { Err(Error::Config { field, value: value.to_string(), rule }) }
        };
        field(self.device_budget > 0, "device_budget", self.device_budget, "it must be at least 1 byte")?;
        field(
            (1..=1 << 20).contains(&self.tile_pages),
            "tile_pages",
            self.tile_pages.into(),
            "it must be 1 to 1,048,576",
        )?;
        let ahead = self.tiles_ahead.unwrap_or(0);
        field(ahead <= 64, "tiles_ahead", ahead.into(), "it must be at most 64")?;
        field(self.state_bytes > 0, "state_bytes", self.state_bytes, "it must be at least 1")
    }

    /// The configuration of the store inside.
    pub(super) fn store(&self) -> StoreConfig {
        let non_finite = if self.refuse_non_finite { NonFinite::Refuse } else { NonFinite::Keep };
        StoreConfig { state_bytes: self.state_bytes, non_finite, ..StoreConfig::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_field_is_named() {
        let wrong = |change: fn(&mut SwapConfig)| {
            let mut config = SwapConfig::default();
            change(&mut config);
            match config.validate() {
                Err(Error::Config { field, .. }) => field,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(wrong(|c| c.device_budget = 0), "device_budget");
        assert_eq!(wrong(|c| c.tile_pages = 0), "tile_pages");
        assert_eq!(wrong(|c| c.tiles_ahead = Some(65)), "tiles_ahead");
        assert_eq!(wrong(|c| c.state_bytes = 0), "state_bytes");
        assert_eq!(SwapConfig::default().validate(), Ok(()));
    }

    #[test]
    fn a_file_of_settings_may_leave_fields_out_but_not_add_some() {
        let config: SwapConfig = serde_json::from_str(r#"{"device_budget": 4096, "policy": "lru"}"#).unwrap();
        assert_eq!(config, SwapConfig { device_budget: 4096, policy: PolicyChoice::Lru, ..SwapConfig::default() });
        assert!(serde_json::from_str::<SwapConfig>(r#"{"graph": true}"#).is_err());
    }
}
