"""`pilotlight weights login` and `logout`: verifies a registry login and stores it where Docker and Podman look.

Passwords are not accepted on the command line, where `ps` would show them. `artifacts.credentials.login_storage`
decides where a login is stored.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from artifacts.credentials import login_storage as logins
from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.http.transport import Site
from artifacts.reference import BadReferenceError, parse_registry_host
from artifacts.registry import manifests
from artifacts.registry.client import Client
from artifacts.registry_errors import RegistryError
from pilotlight.models.registry_access import list_login_files
from pilotlight.options import output_option, registry_options
from pilotlight.safe_output import write_json

PASSWORD_CHARS_MAX = 64 << 10
registry_argument = click.argument("name", metavar="REGISTRY")


@click.command(epilog="Example: pilotlight weights login ghcr.io -u robot --password-stdin")
@registry_argument
@click.option("-u", "--username", help="The user name. Default: it is prompted for.")
@click.option("--password-stdin", is_flag=True, help="Read the password or token from standard input.")
@registry_options
@output_option
def login(  # noqa: PLR0917  click passes by keyword
    name: str, username: str | None, password_stdin: bool, ca_file: Path | None, plain_http: bool, output: str
) -> None:
    """Verify a login with a registry and store it for `pull`, `push`, `serve`, Docker and Podman."""
    host = _host(name)
    given = _given(host, username, password_stdin=password_stdin)
    site = Site(host, plain_http=True if plain_http else None, ca=ca_file)
    try:
        checked, place = asyncio.run(_login(site, given))
    except RegistryError as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        summary = {"registry": name, "username": given.user, "checked": checked, "file": str(place.file)}
        write_json(summary | {"program": place.program})
        return
    click.echo(f"{name}: logged in as {given.user}; stored in {place}")
    if not checked:
        click.echo(f"pilotlight: {name} requires no login, so this one was not verified", err=True)


@click.command(epilog="Example: pilotlight weights logout ghcr.io")
@registry_argument
@output_option
def logout(name: str, output: str) -> None:
    """Delete the login for a registry from all files of Docker, Podman and Pilotlight."""
    host = _host(name)
    try:
        gone = asyncio.run(logins.remove_login(list_login_files(), host))
    except RegistryError as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        places = [{"file": str(place.file), "program": place.program} for place in gone]
        write_json({"registry": name, "forgotten": places})
        return
    for place in gone:
        click.echo(f"{name}: logged out; removed from {place}")
    if not gone:
        click.echo(f"{name}: no login is stored")


async def _login(site: Site, given: Login) -> tuple[bool, logins.LoginLocation]:
    async with Client(site, Known(site.host, given)) as client:
        checked = await manifests.is_login_accepted(client)
    return checked, await logins.save_login(list_login_files(), site.host, given)


def _host(name: str) -> str:
    try:
        return parse_registry_host(name)
    except BadReferenceError as error:
        raise click.UsageError(str(error)) from None


def _given(host: str, user: str | None, *, password_stdin: bool) -> Login:
    """Return the login from the options, the prompt or standard input."""
    if password_stdin:
        if user is None:
            raise click.UsageError(
                "--password-stdin requires --username, because standard input contains only the password"
            )
        password = sys.stdin.read(PASSWORD_CHARS_MAX + 1).removesuffix("\n").removesuffix("\r")
    elif not sys.stdin.isatty():
        raise click.UsageError("cannot prompt for the password without a terminal: use --username and --password-stdin")
    else:
        user = user or click.prompt("Username", type=str)
        password = click.prompt(f"Password for {host}", type=str, hide_input=True)
    if not password or len(password) > PASSWORD_CHARS_MAX or not password.isprintable():
        raise click.UsageError("the password is empty, too long, or has more than one line")
    if not user or ":" in user or not user.isprintable():
        raise click.UsageError("the user name is empty, or contains `:` or control characters")
    return Login(user, password)
