//! The `emberflow` binary.

fn main() -> std::process::ExitCode {
    emberflow::cli::main(std::env::args_os())
}
