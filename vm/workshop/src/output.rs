//! What the workshop's commands print on standard output.

use std::{
    fmt,
    io::{ErrorKind, Write},
};

/// Prints a text. Where nobody reads it any more (`| head`), the command continues, and its exit code remains;
/// where it cannot be written, on a full disk for example, the process ends with 1, and `name` says why.
pub fn print(name: &str, text: fmt::Arguments<'_>) {
    let mut out = std::io::stdout();
    if let Err(error) = out.write_fmt(text).and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = writeln!(std::io::stderr(), "{name}: cannot write the output: {error}");
        std::process::exit(1);
    }
}

/// Prints a line, as `println!` does, which panics where it cannot: see the function `output::print`.
#[macro_export]
macro_rules! outln {
    () => { $crate::output::print(env!("CARGO_PKG_NAME"), format_args!("\n")) };
    ($($arg:tt)*) => {
        $crate::output::print(env!("CARGO_PKG_NAME"), format_args!("{}\n", format_args!($($arg)*)))
    };
}

/// Prints a text, as `print!` does, which panics where it cannot: see the function `output::print`.
#[macro_export]
macro_rules! out {
    ($($arg:tt)*) => { $crate::output::print(env!("CARGO_PKG_NAME"), format_args!($($arg)*)) };
}
