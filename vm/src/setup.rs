//! What has to be on this machine: packages, kernels, disk images, and the cache that holds them.

pub mod apt;
pub mod bundle;
pub mod cache;
pub mod kernels;
pub mod packages;
pub mod root;
pub mod suite;
