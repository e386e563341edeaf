//! Which pages matter to a query? Keys in few dimensions, and scores of pages from them.
//!
//! A [`Basis`] is a matrix P `[k_dim, rank]` for each layer and KV head, or one for all. `project` keeps bf16(kᵀP) of every
//! stored key beside the pages, in records that [`Projections`] lays out; `score` takes the best ⟨bf16(qᵀP), bf16(kᵀP)⟩
//! of a page over its tokens and the query heads that read it. Both are operations of
//! [`Backend`](crate::Backend::project); their arguments are in [`backend::ops`](crate::backend::ops).
//!
//! With a Gaussian basis the scores are the dot products q·k up to a factor rank / k_dim and an error that shrinks as
//! 1/√rank (W. Johnson and J. Lindenstrauss, *Extensions of Lipschitz mappings into a Hilbert space*, 1984; for Gaussian
//! matrices P. Indyk and R. Motwani, *Approximate nearest neighbors*, 1998). For a key in the direction of its query the
//! relative error is about √(2 / rank).

mod basis;
mod file;
mod layout;

pub use basis::{Basis, BasisKind};
pub use layout::Projections;
