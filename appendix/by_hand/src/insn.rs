//! BPF instructions, and a builder that puts them together.
//!
//! The machine has ten general registers of 64 bits, and a stack of 512 bytes, which grows down from
//! the address in `r10`. A program finds its context in `r1` and returns `r0`. A call takes its
//! arguments in `r1` to `r5`, returns `r0`, and may change `r1` to `r5`; `r6` to `r9` keep their values.

use std::os::fd::AsRawFd;

/// One instruction, as the kernel reads it: `struct bpf_insn` in linux/bpf.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insn {
    /// What to do; the lowest three bits are the class.
    pub code: u8,
    /// The destination register in the lower four bits, the source register in the upper four.
    pub registers: u8,
    /// Offset of a memory access in bytes, or of a jump in instructions.
    pub offset: i16,
    /// A constant operand, or the number of a helper function.
    pub immediate: i32,
}

/// A register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
}
use Reg::*;

/// The functions of the kernel that our programs call, by their numbers in linux/bpf.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(missing_docs)]
pub enum Helper {
    MapLookupElem = 1,
    MapUpdateElem = 2,
    MapDeleteElem = 3,
    KtimeGetNs = 5,
    TracePrintk = 6,
    GetCurrentPidTgid = 14,
    PerfEventOutput = 25,
}

// Classes.
const LD: u8 = 0x00; // load a constant
const LDX: u8 = 0x01; // load from memory
const ST: u8 = 0x02; // store a constant
const STX: u8 = 0x03; // store a register
const ALU: u8 = 0x04; // compute with 32 bits
const JMP: u8 = 0x05;
const ALU64: u8 = 0x07;
// Sizes of memory accesses.
const W: u8 = 0x00; // 4 bytes
const DW: u8 = 0x18; // 8 bytes
// How an access names its memory.
const IMM: u8 = 0x00;
const MEM: u8 = 0x60;
// Second operand.
const K: u8 = 0x00; // the constant
const X: u8 = 0x08; // the source register
// Operations of the classes ALU and ALU64.
const ADD: u8 = 0x00;
const SUB: u8 = 0x10;
const MOV: u8 = 0xb0;
// Operations of the class JMP.
const JEQ: u8 = 0x10;
const JNE: u8 = 0x50;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;

/// As the source register of a constant: the constant is the file descriptor of a map.
const PSEUDO_MAP_FD: u8 = 1;

/// A jump whose target is not known yet.
#[must_use = "a jump needs a target"]
pub struct Jump(usize);

/// A program in the making.
#[derive(Debug, Default)]
pub struct Code(Vec<Insn>);

impl Code {
    /// An empty program.
    pub fn new() -> Code {
        Code::default()
    }

    /// The instructions.
    pub fn instructions(&self) -> &[Insn] {
        &self.0
    }

    fn push(&mut self, code: u8, dst: Reg, src: u8, offset: i16, immediate: i32) {
        self.0.push(Insn { code, registers: dst as u8 | src << 4, offset, immediate });
    }

    /// `dst = constant`, extended to 64 bits with its sign.
    pub fn set(&mut self, dst: Reg, constant: i32) {
        self.push(ALU64 | MOV | K, dst, 0, 0, constant);
    }

    /// `dst = constant`, extended to 64 bits with zeroes.
    pub fn set32(&mut self, dst: Reg, constant: u32) {
        self.push(ALU | MOV | K, dst, 0, 0, constant as i32);
    }

    /// `dst = constant`: the only instruction that takes the place of two.
    pub fn set64(&mut self, dst: Reg, constant: u64) {
        self.push(LD | DW | IMM, dst, 0, 0, constant as i32);
        self.push(0, R0, 0, 0, (constant >> 32) as i32);
    }

    /// `dst = address of map`: the kernel replaces the file descriptor when it loads the program.
    pub fn set_map(&mut self, dst: Reg, map: &impl AsRawFd) {
        self.push(LD | DW | IMM, dst, PSEUDO_MAP_FD, 0, map.as_raw_fd());
        self.push(0, R0, 0, 0, 0);
    }

    /// `dst = src`
    pub fn copy(&mut self, dst: Reg, src: Reg) {
        self.push(ALU64 | MOV | X, dst, src as u8, 0, 0);
    }

    /// `dst += constant`
    pub fn add(&mut self, dst: Reg, constant: i32) {
        self.push(ALU64 | ADD | K, dst, 0, 0, constant);
    }

    /// `dst -= src`
    pub fn subtract(&mut self, dst: Reg, src: Reg) {
        self.push(ALU64 | SUB | X, dst, src as u8, 0, 0);
    }

    /// `dst = r10 + offset`: an address on the stack.
    pub fn stack_address(&mut self, dst: Reg, offset: i32) {
        self.copy(dst, R10);
        self.add(dst, offset);
    }

    /// `dst = *(u64 *)(src + offset)`
    pub fn load(&mut self, dst: Reg, src: Reg, offset: i16) {
        self.push(LDX | MEM | DW, dst, src as u8, offset, 0);
    }

    /// `*(u64 *)(dst + offset) = src`
    pub fn store(&mut self, dst: Reg, offset: i16, src: Reg) {
        self.push(STX | MEM | DW, dst, src as u8, offset, 0);
    }

    /// `*(u32 *)(dst + offset) = constant`
    pub fn store32(&mut self, dst: Reg, offset: i16, constant: i32) {
        self.push(ST | MEM | W, dst, 0, offset, constant);
    }

    /// `r0 = helper(r1, …)`
    pub fn call(&mut self, helper: Helper) {
        self.push(JMP | CALL, R0, 0, 0, helper as i32);
    }

    /// `if (left == 0) goto …`; [`land`](Code::land) says where.
    pub fn jump_if_zero(&mut self, left: Reg) -> Jump {
        self.push(JMP | JEQ | K, left, 0, 0, 0);
        Jump(self.0.len() - 1)
    }

    /// `if (left != 0) goto …`; [`land`](Code::land) says where.
    pub fn jump_unless_zero(&mut self, left: Reg) -> Jump {
        self.push(JMP | JNE | K, left, 0, 0, 0);
        Jump(self.0.len() - 1)
    }

    /// The jump leads to the next instruction. Offsets count from the instruction after the jump.
    pub fn land(&mut self, Jump(from): Jump) {
        self.0[from].offset = (self.0.len() - from - 1) as i16;
    }

    /// `return r0`
    pub fn exit(&mut self) {
        self.push(JMP | EXIT, R0, 0, 0, 0);
    }

    /// `return constant`
    pub fn exit_with(&mut self, constant: i32) {
        self.set(R0, constant);
        self.exit();
    }

    /// Adds 1 to this CPU's value of `index` in a per-CPU array of 64-bit values. Uses the lowest
    /// four bytes of the stack at `scratch` for the key, and `r0` to `r5`.
    ///
    /// The load, the addition and the store need not be atomic: no other CPU has this value, and
    /// nothing interrupts the program to run it a second time.
    pub fn count(&mut self, counters: &impl AsRawFd, index: u32, scratch: i16) {
        self.store32(R10, scratch, index as i32);
        self.stack_address(R2, scratch.into());
        self.set_map(R1, counters);
        self.call(Helper::MapLookupElem);
        // The verifier rejects a program that does not check for NULL, though an array has all keys.
        let absent = self.jump_if_zero(R0);
        self.load(R1, R0, 0);
        self.add(R1, 1);
        self.store(R0, 0, R1);
        self.land(absent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are those of the kernel's documentation: Documentation/bpf/standardization/.
    #[test]
    fn instructions_have_their_encoding() {
        let mut code = Code::new();
        code.set(R0, 0); // b7 00
        code.set32(R3, u32::MAX); // b4 03
        code.set64(R1, 0x0021_2121_6f6c_6c65); // 18 01, and its upper half
        code.copy(R6, R1); // bf 16
        code.add(R2, -4); // 07 02
        code.subtract(R7, R1); // 1f 17
        code.load(R1, R0, 8); // 79 01
        code.store(R10, -8, R0); // 7b 0a
        code.store32(R10, -4, 7); // 62 0a
        code.call(Helper::KtimeGetNs); // 85
        code.exit(); // 95
        let insn = |code, registers, offset, immediate| Insn { code, registers, offset, immediate };
        let expected = [
            insn(0xb7, 0x00, 0, 0),
            insn(0xb4, 0x03, 0, -1),
            insn(0x18, 0x01, 0, 0x6f6c_6c65),
            insn(0x00, 0x00, 0, 0x0021_2121),
            insn(0xbf, 0x16, 0, 0),
            insn(0x07, 0x02, 0, -4),
            insn(0x1f, 0x17, 0, 0),
            insn(0x79, 0x01, 8, 0),
            insn(0x7b, 0x0a, -8, 0),
            insn(0x62, 0x0a, -4, 7),
            insn(0x85, 0x00, 0, 5),
            insn(0x95, 0x00, 0, 0),
        ];
        assert_eq!(code.instructions(), expected);
        assert_eq!(size_of::<Insn>(), 8);
    }

    #[test]
    fn a_jump_counts_from_the_next_instruction() {
        let mut code = Code::new();
        let zero = code.jump_if_zero(R0);
        let other = code.jump_unless_zero(R0);
        code.exit();
        code.land(zero);
        code.land(other);
        code.exit();
        let offsets: Vec<_> = code.instructions().iter().map(|insn| insn.offset).collect();
        assert_eq!(offsets, [2, 1, 0, 0]);
    }
}
