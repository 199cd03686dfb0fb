//! The kernel's description of its types (BTF), vmlinux's and that of every module.
//!
//! libbpf parses it. libbpf-rs opens no module's BTF, because that one continues vmlinux's; hence
//! libbpf's own functions. The crate btf-rs (2.0) opens it, too, but copies each type: vmlinux's take it 373
//! ms instead of 45, and 42 MB instead of 14. It maps the file where the kernel lets it, and then a walk over
//! all functions takes 105 ms instead of 12. It is under the LGPL alone.

use std::{
    ffi::{CStr, CString},
    fs,
    ptr::{self, NonNull},
    slice,
};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::{
    self as sys, BTF_KIND_CONST, BTF_KIND_FLOAT, BTF_KIND_FUNC, BTF_KIND_FWD, BTF_KIND_PTR,
    BTF_KIND_RESTRICT, BTF_KIND_STRUCT, BTF_KIND_TYPE_TAG, BTF_KIND_TYPEDEF, BTF_KIND_UNION,
    BTF_KIND_VOLATILE, btf_param, btf_type,
};

use crate::mounted::mounted;

/// The modules that are loaded and have a BTF of their own, sorted.
pub fn modules() -> Result<Vec<String>> {
    let entries = fs::read_dir("/sys/kernel/btf").context("/sys/kernel/btf")?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name != "vmlinux").collect();
    names.sort();
    Ok(names)
}

/// The types of vmlinux, or those of a module on top of them.
pub struct Btf<'base> {
    pointer: NonNull<sys::btf>,
    base: Option<&'base Btf<'base>>,
}

impl Drop for Btf<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from libbpf, and nobody else frees it.
        unsafe { sys::btf__free(self.pointer.as_ptr()) }
    }
}

impl<'base> Btf<'base> {
    /// Reads `/sys/kernel/btf/NAME`. Fails where the kernel has no such file, or libbpf cannot
    /// parse it.
    pub fn read(name: &str, base: Option<&'base Btf<'base>>) -> Result<Btf<'base>> {
        mounted()?;
        Btf::open(&format!("/sys/kernel/btf/{name}"), base)
    }

    /// Reads a file with types, or an object file that contains them.
    pub fn open(path: &str, base: Option<&'base Btf<'base>>) -> Result<Btf<'base>> {
        let c_path = CString::new(path).context("a path has a zero byte")?;
        let below = base.map_or(ptr::null_mut(), |base| base.pointer.as_ptr());
        // SAFETY: the path ends with a zero, and the base outlives the result.
        let pointer = unsafe { sys::btf__parse_split(c_path.as_ptr(), below) };
        let error = std::io::Error::last_os_error();
        let pointer =
            NonNull::new(pointer).ok_or(error).with_context(|| format!("cannot parse {path}"))?;
        Ok(Btf { pointer, base })
    }

    fn count(&self) -> u32 {
        // SAFETY: the pointer is valid as long as self.
        unsafe { sys::btf__type_cnt(self.pointer.as_ptr()) }
    }

    /// The type with this number.
    pub fn get(&self, id: u32) -> Type<'_> {
        // SAFETY: the pointer is valid as long as self; an unknown number gives NULL.
        let found = unsafe { sys::btf__type_by_id(self.pointer.as_ptr(), id).as_ref() };
        Type { btf: self, id, found }
    }

    /// The functions that this BTF adds to its base's.
    pub fn functions(&self) -> impl Iterator<Item = Type<'_>> {
        self.of_kind(BTF_KIND_FUNC)
    }

    /// The enum that has a constant of this name.
    pub fn enum_with(&self, constant: &str) -> Option<Type<'_>> {
        self.of_kind(sys::BTF_KIND_ENUM)
            .find(|kind| kind.constants().iter().any(|(name, _)| *name == constant))
    }

    fn of_kind(&self, kind: u32) -> impl Iterator<Item = Type<'_>> {
        let first = self.base.map_or(1, Btf::count);
        (first..self.count()).map(|id| self.get(id)).filter(move |found| found.is(kind))
    }

    /// The struct of this name.
    pub fn structure(&self, name: &str) -> Option<Type<'_>> {
        self.find(name, BTF_KIND_STRUCT)
    }

    /// The function of this name.
    pub fn function(&self, name: &str) -> Option<Type<'_>> {
        self.find(name, BTF_KIND_FUNC)
    }

    fn find(&self, name: &str, kind: u32) -> Option<Type<'_>> {
        let name = CString::new(name).ok()?;
        let pointer = self.pointer.as_ptr();
        // SAFETY: both pointers are valid during the call.
        let id = unsafe { sys::btf__find_by_name_kind(pointer, name.as_ptr(), kind) };
        Some(self.get(u32::try_from(id).ok()?))
    }
}

/// A member of a struct or union.
pub struct Member<'a> {
    /// Its name; `""` for a struct or union without one, whose members are the outer one's.
    pub name: &'a str,
    /// Its type.
    pub kind: Type<'a>,
    /// The number of its first bit.
    pub offset: usize,
    /// Its width, where it is a bit field.
    pub bits: Option<usize>,
}

/// A type of BTF.
#[derive(Clone, Copy)]
pub struct Type<'a> {
    btf: &'a Btf<'a>,
    id: u32,
    /// `None`: void.
    found: Option<&'a btf_type>,
}

impl<'a> Type<'a> {
    /// Its `BTF_KIND_`; 0 for `void`.
    pub fn kind(&self) -> u32 {
        self.found.map_or(0, |found| found.info >> 24 & 0x1f)
    }

    fn is(&self, kind: u32) -> bool {
        self.kind() == kind
    }

    fn is_one_of(&self, kinds: &[u32]) -> bool {
        kinds.contains(&self.kind())
    }

    /// Whether it is `void`.
    pub fn is_void(&self) -> bool {
        self.id == 0
    }

    fn size_or_type(&self) -> u32 {
        // SAFETY: both members of the union are a u32.
        self.found.map_or(0, |found| unsafe { found.__bindgen_anon_1.size })
    }

    fn next(&self) -> Type<'a> {
        self.btf.get(self.size_or_type())
    }

    fn string(&self, offset: u32) -> &'a str {
        // SAFETY: libbpf returns NULL or a string that lives as long as the BTF.
        let name = unsafe { sys::btf__name_by_offset(self.btf.pointer.as_ptr(), offset) };
        // SAFETY: as above.
        let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
        name.and_then(|name| name.to_str().ok()).unwrap_or_default()
    }

    /// Its name; `""` for a type that has none.
    pub fn name(&self) -> &'a str {
        self.found.map_or("", |found| self.string(found.name_off))
    }

    /// What it is without `const`, `typedef` and the like.
    pub fn bare(self) -> Type<'a> {
        let wrapped = [
            BTF_KIND_CONST,
            BTF_KIND_VOLATILE,
            BTF_KIND_RESTRICT,
            BTF_KIND_TYPEDEF,
            BTF_KIND_TYPE_TAG,
        ];
        let mut bare = self;
        while bare.is_one_of(&wrapped) {
            bare = bare.next();
        }
        bare
    }

    /// The bytes of a value of this type.
    pub fn size(&self) -> usize {
        // SAFETY: the pointer is valid as long as the BTF.
        let size = unsafe { sys::btf__resolve_size(self.btf.pointer.as_ptr(), self.id) };
        usize::try_from(size).unwrap_or(0)
    }

    /// Whether it is a pointer to `struct NAME`.
    pub fn points_to(&self, name: &str) -> bool {
        let pointer = self.bare();
        let target = pointer.next().bare();
        pointer.is(BTF_KIND_PTR)
            && target.is_one_of(&[BTF_KIND_STRUCT, BTF_KIND_FWD])
            && target.name() == name
    }

    /// The parameters of a function: name and type.
    pub fn parameters(&self) -> Vec<(&'a str, Type<'a>)> {
        let prototype = self.next();
        let parameters = prototype.after::<btf_param>(prototype.elements());
        let typed = |p: &btf_param| (self.string(p.name_off), self.btf.get(p.type_));
        parameters.iter().map(typed).collect()
    }

    /// What a function returns.
    pub fn result(&self) -> Type<'a> {
        self.next().next()
    }

    /// How an integer is encoded: BTF_INT_SIGNED, BTF_INT_BOOL, or 0.
    pub fn encoding(&self) -> u32 {
        // A btf_type of this kind is followed by a word with the encoding.
        self.after::<u32>(1).first().map_or(0, |word| word >> 24 & 0xf)
    }

    /// The constants of an enum: names and values.
    pub fn constants(&self) -> Vec<(&'a str, i128)> {
        if self.is(sys::BTF_KIND_ENUM) {
            let constants = self.after::<sys::btf_enum>(self.elements()).iter();
            return constants.map(|one| (self.string(one.name_off), one.val.into())).collect();
        }
        let value = |one: &sys::btf_enum64| u64::from(one.val_hi32) << 32 | u64::from(one.val_lo32);
        let constants = self.after::<sys::btf_enum64>(self.elements()).iter();
        constants.map(|one| (self.string(one.name_off), (value(one) as i64).into())).collect()
    }

    /// The members of a struct or union.
    pub fn members(&self) -> Vec<Member<'a>> {
        // Where the type's flag says so, the offset contains the width of a bit field.
        let has_widths = self.found.is_some_and(|found| found.info >> 31 == 1);
        let member = |member: &sys::btf_member| Member {
            name: self.string(member.name_off),
            kind: self.btf.get(member.type_),
            offset: (if has_widths { member.offset & 0xff_ffff } else { member.offset }) as usize,
            bits: Some((member.offset >> 24) as usize).filter(|&bits| has_widths && bits > 0),
        };
        self.after::<sys::btf_member>(self.elements()).iter().map(member).collect()
    }

    /// The elements of an array: their type, and how many there are.
    pub fn array(&self) -> Option<(Type<'a>, usize)> {
        let found =
            if self.is(sys::BTF_KIND_ARRAY) { self.after::<sys::btf_array>(1) } else { &[] };
        found.first().map(|array| (self.btf.get(array.type_), array.nelems as usize))
    }

    /// What a pointer points to.
    pub fn target(&self) -> Option<Type<'a>> {
        self.is(BTF_KIND_PTR).then(|| self.next().bare())
    }

    /// How many members, constants or parameters follow.
    fn elements(&self) -> usize {
        self.found.map_or(0, |found| (found.info & 0xffff) as usize)
    }

    /// What follows a btf_type: so many of `T`, as its kind has them.
    fn after<T>(&self, count: usize) -> &'a [T] {
        let Some(found) = self.found else { return &[] };
        // SAFETY: the callers ask for what a btf_type of this kind is followed by; libbpf has checked
        // that it is there.
        unsafe { slice::from_raw_parts(ptr::from_ref(found).add(1).cast::<T>(), count) }
    }

    /// How many argument registers a value takes; `None`: it is passed on the stack, or in a
    /// floating-point register.
    pub fn registers(&self) -> Option<usize> {
        let bare = self.bare();
        match self.size() {
            _ if bare.is(BTF_KIND_FLOAT) => None,
            size if bare.is_one_of(&[BTF_KIND_STRUCT, BTF_KIND_UNION]) && size > 16 => None,
            size => Some(size.div_ceil(8)),
        }
    }

    /// The type as C writes it before a name: `struct bio *`, `unsigned int `.
    pub fn declaration(&self) -> String {
        let before = |word: &str| format!("{word} {}", self.next().declaration());
        match self.kind() {
            0 => "void ".to_owned(),
            BTF_KIND_PTR => match self.next().bare().name() {
                "" if !self.next().bare().is_void() => "void *".to_owned(), // of a function, an array
                _ => format!("{}*", self.next().declaration()),
            },
            BTF_KIND_CONST => before("const"),
            BTF_KIND_VOLATILE => before("volatile"),
            BTF_KIND_RESTRICT | BTF_KIND_TYPE_TAG => self.next().declaration(),
            BTF_KIND_STRUCT | BTF_KIND_FWD => format!("struct {} ", self.name()),
            BTF_KIND_UNION => format!("union {} ", self.name()),
            sys::BTF_KIND_ENUM | sys::BTF_KIND_ENUM64 => format!("enum {} ", self.name()),
            _ => format!("{} ", self.name()),
        }
    }
}
