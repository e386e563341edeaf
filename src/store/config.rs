//! What a store may be told: growth, limits and what to do with values that are not finite.

use crate::{Error, Result};

/// What an append does with infinite and NaN elements of the K and V handed in.
///
/// A finite element too large for the page's format (above 65,504 in f16) is stored as infinity and not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinite {
    /// Store their bits and count them.
    #[default]
    Keep,
    /// Refuse the append. Every append then reads K and V twice and waits for the count.
    Refuse,
}

/// How a [`PagedStore`](crate::PagedStore) grows and what it refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreConfig {
    /// Pages that the pool grows by at least.
    pub step_pages: u64,
    /// Pages of the pool at most, over all layers and sequences; `None`: half of what the device can address.
    pub page_limit: Option<u64>,
    /// Bytes of attention states at most (one query row may always take what it needs).
    pub state_bytes: u64,
    /// Infinite and NaN elements of K and V.
    pub non_finite: NonFinite,
}

impl Default for StoreConfig {
    fn default() -> Self {
        StoreConfig { step_pages: 32, page_limit: None, state_bytes: 64 << 20, non_finite: NonFinite::Keep }
    }
}

impl StoreConfig {
    pub(super) fn validate(&self) -> Result<()> {
        let at_least_one = |field, value: u64| match value {
            0 => Err(Error::Config { field, value: "0".into(), rule: "it must be at least 1" }),
            _ => Ok(()),
        };
        at_least_one("step_pages", self.step_pages)?;
        at_least_one("page_limit", self.page_limit.unwrap_or(1))?;
        at_least_one("state_bytes", self.state_bytes)
    }
}
