//! A virtual machine: what it boots from, and QEMU.

pub mod initramfs;
pub mod kvm;
pub mod qemu;
pub mod sandbox;
pub mod virtiofs;
