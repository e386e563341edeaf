//! How does a basis get into a file and back? A safetensors file with one tensor and what it must agree with.

use super::basis::{Basis, BasisKind};
use super::layout::check_rank;
use crate::tensor_file::{self, TensorFile};
use crate::{Geometry, Result};
use half::bf16;
use safetensors::Dtype;
use std::path::Path;

/// The tensor `[layer, kv_head, k_dim, rank]` in bf16; one layer and KV head when shared.
const TENSOR: &str = "basis";

impl Basis {
    /// The basis as a safetensors file: tensor `basis` bf16 `[layer, kv_head, k_dim, rank]`, and metadata `version`, `kind`,
    /// `rank`, `k_dim`, `layers`, `kv_heads`.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let data: Vec<u8> = self.values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        let (layers, heads) = self.each;
        let shape = [layers, heads, self.k_dim, self.rank].map(|n| n as usize).to_vec();
        let numbers = [("layers", layers), ("kv_heads", heads), ("k_dim", self.k_dim), ("rank", self.rank)];
        let kind = [("kind", self.kind.name())];
        tensor_file::encode("a basis", Dtype::BF16, &[(TENSOR, shape, &data)], &kind, &numbers)
    }

    /// Writes [`to_bytes`](Self::to_bytes) to a file.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File).
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        tensor_file::save(path.as_ref(), &self.to_bytes()?)
    }

    /// Reads a basis for a model.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when it is no safetensors file; [`Error::WrongFile`](crate::Error::WrongFile)
    /// with the first thing that differs from what the geometry needs; [`Error::Config`](crate::Error::Config) for a rank
    /// that no kernel has or values that are not finite.
    pub fn load(path: impl AsRef<Path>, geometry: &Geometry) -> Result<Self> {
        let (name, bytes) = tensor_file::load(path.as_ref())?;
        Self::parse(&name, &bytes, geometry)
    }

    /// The same from the bytes of a file.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn from_bytes(bytes: &[u8], geometry: &Geometry) -> Result<Self> {
        Self::parse("a basis", bytes, geometry)
    }

    fn parse(name: &str, bytes: &[u8], geometry: &Geometry) -> Result<Self> {
        let geometry = geometry.validate()?;
        let file = TensorFile::parse(name, bytes)?;
        let kinds = BasisKind::ALL;
        let Some(kind) = kinds.into_iter().find(|kind| kind.name() == file.said("kind")) else {
            return Err(file.wrong("kind", file.said("kind"), kinds.map(BasisKind::name).join(" or ")));
        };
        let tensor = file.tensor(TENSOR, Dtype::BF16)?;
        let [layers, heads, k_dim, rank] = file.axes(&tensor)?;
        if (layers, heads) != (1, 1) {
            file.agree("layers", layers, geometry.layers())?;
            file.agree("kv_heads", heads, geometry.kv_heads())?;
        }
        file.agree("k_dim", k_dim, geometry.k_dim())?;
        file.says(&[("layers", layers), ("kv_heads", heads), ("k_dim", k_dim), ("rank", rank)])?;
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        check_rank(rank)?;
        let value = |two: &[u8]| bf16::from_le_bytes([two[0], two[1]]).to_f32();
        let values: Vec<f32> = tensor.data().chunks_exact(2).map(value).collect();
        Ok(Basis { kind, ..Basis::from_matrices(&geometry, rank, &values)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use safetensors::serialize;
    use safetensors::tensor::TensorView;

    fn given() -> (Geometry, Basis) {
        let geometry = Geometry::new(2, 4, 2, 16);
        let values: Vec<f32> = (0..2 * 2 * 16 * 8).map(|at| (at as f32 - 99.0) / 7.0).collect();
        (geometry, Basis::from_matrices(&geometry, 8, &values).unwrap())
    }

    #[test]
    fn what_is_saved_is_what_is_loaded() {
        let (geometry, given) = given();
        let folder = tempfile::tempdir().unwrap();
        for (at, basis) in [given, Basis::gaussian(&geometry, 16, 5).unwrap()].iter().enumerate() {
            let path = folder.path().join(format!("{at}.safetensors"));
            basis.save(&path).unwrap();
            assert_eq!(Basis::load(&path, &geometry).as_ref(), Ok(basis));
            assert_eq!(Basis::from_bytes(&basis.to_bytes().unwrap(), &geometry).as_ref(), Ok(basis));
        }
        assert!(matches!(
            Basis::load(folder.path().join("none"), &geometry),
            Err(Error::File { operation: "read", .. })
        ));
        assert!(matches!(Basis::gaussian(&geometry, 8, 0).unwrap().save(folder.path()), Err(Error::File { .. })));
    }

    #[test]
    fn a_basis_of_another_model_is_refused_by_name() {
        let (geometry, basis) = given();
        let bytes = basis.to_bytes().unwrap();
        for (other, field) in [
            (Geometry::new(3, 4, 2, 16), "layers"),
            (Geometry::new(2, 4, 4, 16), "kv_heads"),
            (Geometry::new(2, 4, 2, 24), "k_dim"),
        ] {
            let error = Basis::from_bytes(&bytes, &other).unwrap_err();
            assert!(matches!(&error, Error::WrongFile { what, .. } if *what == field), "{error}");
        }
        // Shared matrices fit any number of layers and heads, but not any dimension.
        let shared = Basis::gaussian(&geometry, 8, 0).unwrap().to_bytes().unwrap();
        assert!(Basis::from_bytes(&shared, &Geometry::new(40, 8, 8, 16)).is_ok());
        assert!(Basis::from_bytes(&shared, &Geometry::new(2, 4, 2, 24)).is_err());
    }

    #[test]
    fn damaged_and_foreign_files_are_refused() {
        let (geometry, basis) = given();
        let bytes = basis.to_bytes().unwrap();
        for cut in [0, 7, 40, bytes.len() - 1] {
            assert!(matches!(Basis::from_bytes(&bytes[..cut], &geometry), Err(Error::File { operation: "parse", .. })));
        }
        let file = |dtype, shape: &[usize], bytes: usize, metadata: &[(&str, &str)]| {
            let data = vec![0; bytes];
            let view = TensorView::new(dtype, shape.to_vec(), &data).unwrap();
            let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            Basis::from_bytes(&serialize([(TENSOR, view)], Some(metadata)).unwrap(), &geometry).unwrap_err()
        };
        let good =
            [("version", "1"), ("kind", "given"), ("layers", "1"), ("kv_heads", "1"), ("k_dim", "16"), ("rank", "8")];
        let with =
            |key: &'static str, value: &'static str| good.map(|(k, v)| if k == key { (k, value) } else { (k, v) });
        use safetensors::Dtype::{BF16, F32};
        for (error, field) in [
            (file(BF16, &[1, 1, 16, 8], 256, &[]), "version"),
            (file(BF16, &[1, 1, 16, 8], 256, &with("version", "2")), "version"),
            (file(BF16, &[1, 1, 16, 8], 256, &with("kind", "magic")), "kind"),
            (file(BF16, &[1, 1, 16, 8], 256, &with("rank", "16")), "rank"),
            (file(F32, &[1, 1, 16, 8], 512, &good), "dtype"),
            (file(BF16, &[16, 8], 256, &good), "number of axes"),
        ] {
            assert!(matches!(&error, Error::WrongFile { what, .. } if *what == field), "{field}: {error}");
        }
        let error = file(BF16, &[1, 1, 16, 12], 384, &with("rank", "12"));
        assert!(matches!(error, Error::Config { field: "rank", .. }));
    }
}
