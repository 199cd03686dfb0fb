//! What has to be on this machine: packages, kernels, disk images, and the cache that holds them.

pub(crate) mod apt;
pub(crate) mod cache;
pub(crate) mod index;
pub(crate) mod kernel;
pub(crate) mod packages;
pub mod rootfs;
pub(crate) mod seal;
pub(crate) mod table;
