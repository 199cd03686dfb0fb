//! What has to be on this machine: packages, kernels, disk images, and the cache that holds them.

pub mod apt;
pub mod cache;
pub mod index;
pub mod kernel;
pub mod packages;
pub mod rootfs;
pub mod table;
