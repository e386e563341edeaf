//! A sequence as its owner holds it: a handle that gives the pages back when it is dropped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Names one store of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoreId(u64);

impl StoreId {
    pub(super) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        StoreId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Where dropped handles leave their numbers for the store to find.
#[derive(Debug, Clone, Default)]
pub(super) struct Graveyard(Arc<Mutex<Vec<u64>>>);

impl Graveyard {
    fn bury(&self, id: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(id);
    }

    pub(super) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One sequence of a [`PagedStore`](crate::PagedStore).
///
/// There is exactly one handle a sequence; dropping it gives the pages back, so they cannot be given back twice.
#[derive(Debug)]
pub struct Sequence {
    id: u64,
    store: StoreId,
    graveyard: Graveyard,
}

impl Sequence {
    pub(super) fn new(id: u64, store: StoreId, graveyard: Graveyard) -> Self {
        Sequence { id, store, graveyard }
    }

    /// A number that no other sequence of the store has or had.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn store(&self) -> StoreId {
        self.store
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.graveyard.bury(self.id);
    }
}
