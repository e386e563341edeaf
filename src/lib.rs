//! kvtide: a paged KV cache for language models that may be larger than the GPU, on any GPU.
//!
//! K and V live in fixed-size pages on the device. New tokens are written into them, attention runs straight over them
//! in splits whose partial results merge exactly, sequences fork and share pages until one of them writes.
//!
//! ```text
//! append → store (pages, tables, frames)
//!              ↓
//!          backend: append · transfer (copy, gather, scatter) · attend (attend, merge) · predictor (project, score)
//! ```
#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod aligned;
pub mod attention;
pub mod backend;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod geometry;
mod pages;
pub mod predictor;
pub mod quantize;
pub mod record;
mod store;
pub mod swap;
mod tensor_file;
pub mod tiers;

pub use backend::ops::View;
pub use backend::{Backend, Caps, Device, DeviceBuffer};
pub use error::{Error, PageFault, Result};
pub use geometry::{Dtype, Geometry, PageFormat};
pub use quantize::{KeyCalibration, KeyCheck, KeyStatistics};
pub use store::{
    Append, AttentionContext, Capture, ContextView, NonFinite, PagedStore, Query, Rows, Sequence, SequenceContext,
    Stats, Step, StepPlan, StoreConfig,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
