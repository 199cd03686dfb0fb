//! The names by which a server knows itself.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The names that a request may be for, in its header `Host`.
///
/// An IP address is one of them, whichever it is: a page that a browser has got from an address cannot make
/// that address lead elsewhere. `localhost` and the machine's own name are, too, and those that are given.
pub struct Names(Vec<String>);

impl Names {
    /// The machine's own names, and these.
    pub fn new(given: &[String]) -> Names {
        let system = rustix::system::uname();
        let machine = system.nodename().to_string_lossy();
        let label = machine.split('.').next().unwrap_or_default();
        let own = [
            "localhost".to_owned(),
            machine.to_string(),
            label.to_owned(),
            format!("{label}.local"),
        ];
        Names(own.iter().chain(given).map(|name| bare(name)).filter(|it| !it.is_empty()).collect())
    }

    /// Whether this is one of them, with or without a port: `localhost:9435`.
    pub(crate) fn has(&self, host: &[u8]) -> bool {
        let Ok(host) = std::str::from_utf8(host) else { return false };
        if let Some(rest) = host.strip_prefix('[') {
            let Some((address, port)) = rest.split_once(']') else { return false };
            // `%eth0`: the interface that a link's own address is of.
            let address = address.split('%').next().unwrap_or_default();
            return address.parse::<Ipv6Addr>().is_ok() && is_port(port);
        }
        let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
        is_port(port) && (name.parse::<Ipv4Addr>().is_ok() || self.0.contains(&bare(name)))
    }
}

/// As names are compared: without the dot that ends a complete one.
fn bare(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Whether this is what may follow a name: nothing, or a port.
fn is_port(text: &str) -> bool {
    text.is_empty()
        || text.strip_prefix(':').is_some_and(|port| port.bytes().all(|it| it.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_anybody_can_register_is_not_ours() {
        let names = Names::new(&["disks.example.com".to_owned(), "Upper.example.com.".to_owned()]);
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for ours in [
            "localhost",
            "LocalHost.:1",
            "127.0.0.1:9435",
            "10.1.2.3",
            "[::1]",
            "[::1]:9435",
            "[fe80::1%eth0]:9435",
            "disks.example.com:80",
            "upper.example.com",
            &machine,
            &format!("{machine}:3001"),
        ] {
            assert!(names.has(ours.as_bytes()), "{ours}");
        }
        for foreign in [
            "",
            ":80",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "xdisks.example.com",
            "disks.example.com.evil.example:80",
            "localhost:80.evil.example",
            "evil.example:80:80",
            "evil.example@localhost",
            "localhost evil.example",
            "[::1].evil.example",
            "[::1",
            "::1",
            "[evil.example]",
            "2130706433.evil.example",
        ] {
            assert!(!names.has(foreign.as_bytes()), "{foreign}");
        }
        assert!(!names.has(b"local\xffhost"));
    }

    #[test]
    fn a_machine_without_a_name_has_no_empty_one() {
        assert!(Names::new(&[String::new()]).0.iter().all(|name| !name.is_empty()));
    }
}
